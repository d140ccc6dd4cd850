"""Memory of the simulated GPUs: who has allocated, exported and mapped it. A part of FakeDriver."""

from fake_world import GAP, Buffer


class FakeMemory:
    def allocate(self, nbytes):
        with self.world.lock:
            self._called("allocate")
            buffer = Buffer(self.rank, nbytes)
            address = next(self.world.addresses)
            for _ in range(nbytes // GAP):
                next(self.world.addresses)
            self.maps[address] = (buffer, True)
            self.world.buffers[f"memory {next(self.world.numbers)}".ljust(64)] = buffer
            return address

    def free(self, address):
        with self.world.lock:
            self._called("free")
            buffer, own = self.maps.pop(address, (None, False))
            if buffer is None or not own:
                return self.world.wrong(f"rank {self.rank} frees what it has not allocated")
            if buffer.importers:
                self.world.wrong(f"rank {self.rank} frees memory that ranks {sorted(buffer.importers)} have open")
            self._unused(buffer, "frees")
            buffer.freed = True
            self.world.forget(buffer.real, buffer.nbytes)

    def _unused(self, buffer, what):
        for stream in self.world.streams:
            if any(buffer in op.buffers for op in stream.ops) and (stream.rank == self.rank or what == "frees"):
                self.world.wrong(f"rank {self.rank} {what} memory that rank {stream.rank}'s stream still uses")

    def export_memory(self, address):
        with self.world.lock:
            self._called("export_memory")
            return next(h for h, b in self.world.buffers.items() if b is self.maps[address][0]).encode()

    def open_memory(self, handle):
        with self.world.lock:
            self._called("open_memory")
            buffer = self.world.buffers[handle.decode()]
            if self.world.drivers[buffer.owner].process == self.process:
                self.world.wrong(f"rank {self.rank} opens memory of its own process")
                raise RuntimeError("invalid device context")
            if self.world.separate and self.world.drivers[buffer.owner].uuid != self.uuid:
                raise RuntimeError("CUDA_ERROR_INVALID_VALUE: of another GPU instance")
            if buffer.freed:
                self.world.wrong(f"rank {self.rank} opens memory that is freed")
            buffer.importers.add(self.rank)
            address = next(self.world.addresses)
            for _ in range(buffer.nbytes // GAP):
                next(self.world.addresses)
            self.maps[address] = (buffer, False)
            return address

    def close_memory(self, address):
        with self.world.lock:
            self._called("close_memory")
            buffer, own = self.maps.pop(address, (None, True))
            if own:
                return self.world.wrong(f"rank {self.rank} closes what it has not opened")
            self._unused(buffer, "closes")
            buffer.importers.discard(self.rank)

    def allocate_pinned(self, nbytes):
        with self.world.lock:
            self._called("allocate_pinned")
            buffer = Buffer(self.rank, nbytes)
            self.world.pinned[buffer.real] = (self.rank, buffer)
            return buffer.real

    def free_pinned(self, address):
        with self.world.lock:
            self._called("free_pinned")
            if address not in self.world.pinned:
                return self.world.wrong(f"rank {self.rank} frees pinned memory that is not there")
            _, buffer = self.world.pinned.pop(address)
            self.world.keep.append(buffer)
            for stream in self.world.streams:
                for op in stream.ops:
                    if any(a < address + buffer.nbytes and address < a + n for a, n in op.reads + op.writes):
                        self.world.wrong(f"rank {self.rank} frees pinned memory under a copy")
            self.world.forget(address, buffer.nbytes)
