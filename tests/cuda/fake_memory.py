"""Memory of the simulated GPUs: who has allocated, exported and mapped it. A part of FakeDriver.

Tensors lie in segments of torch's allocator, which here are tensors' own memory, each an allocation of its own, if
they have been told of (`adopt`). What of a segment others have open is CUDA's business until they close it: its owner
may free it, and put another in its place, whose handle then is the same; who opens that one without having closed
the other gets the other's memory.
"""

import ctypes

import torch

from c10d_custom.transport.cuda.mappings import Allocation
from fake_world import GAP, Buffer, Segment


class FakeMemory:
    # --- segments

    def adopt(self, tensor):
        """The tensor's memory is a segment of this rank's."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self.segment_at(storage.data_ptr(), storage.nbytes())

    def segment_at(self, base, nbytes, real=None):
        """A segment at an address, whose bytes are at ``real`` (None: there)."""
        with self.world.lock:
            found = self.world.segments.get(base)
            if found is None or found.freed or found.owner != self.rank or found.nbytes != nbytes:
                found = self.world.segments[base] = Segment(self.rank, base, nbytes, real, next(self.world.numbers))
            return found

    def free_segment(self, base):
        with self.world.lock:
            segment = self.world.segments.pop(base)
            for stream in self.world.streams:
                if any(segment in op.buffers for op in stream.ops):
                    self.world.wrong(f"rank {self.rank} frees a segment that rank {stream.rank}'s stream still uses")
            segment.freed = True

    def torch_frees(self, base):
        """What nobody has any more: torch gives it back to CUDA."""
        with self.world.lock:
            if importers := self.world.segments[base].importers:
                self.world.wrong(f"torch frees a segment of rank {self.rank} that ranks {sorted(importers)} have open")
            self.world.forget(base, self.world.segments[base].nbytes)
        self.free_segment(base)

    def _segment(self, address, nbytes, what):
        """The one that an address of this process lies in, or None."""
        if nbytes and address < 1 << 12:
            self.world.wrong(f"{what} of rank {self.rank} uses address {address}")
            raise RuntimeError(f"illegal address {address} in {what}")
        for segment in self.world.segments.values():
            end = segment.base + segment.nbytes
            if segment.base <= address < end:
                if segment.owner != self.rank:
                    self.world.wrong(f"{what} of rank {self.rank} uses memory of rank {segment.owner} that is not open")
                if address + nbytes > end and end not in self.world.segments:
                    self.world.wrong(f"{what} of rank {self.rank} goes beyond the memory it begins in")
                    raise RuntimeError(f"illegal address {end} in {what}")
                return segment
        return None

    def allocation_of(self, address):
        with self.world.lock:
            self._called("allocation_of")
            for segment in self.world.segments.values():
                if segment.owner == self.rank and segment.base <= address < segment.base + segment.nbytes:
                    return Allocation(segment.base, segment.nbytes, segment.number) if segment.exportable else None
            for base, (buffer, own) in self.maps.items() if self.world.mapped else ():
                if own and base <= address < base + buffer.nbytes:
                    return Allocation(base, buffer.nbytes, buffer.number)
            return None

    def _open_segment(self, handle):
        found = self.opened.get(handle)
        if found is not None:
            found[1] += 1
            return found[0]
        rank, base = (int(word) for word in handle.decode().split()[1:])
        segment = self.world.segments[base]
        if self.world.drivers[rank].process == self.process:
            self.world.wrong(f"rank {self.rank} opens memory of its own process")
        self.opened[handle] = [self._map(segment), 1]
        return self.opened[handle][0]

    # --- what `allocate` gives

    def allocate(self, nbytes):
        with self.world.lock:
            self._called("allocate")
            buffer = Buffer(self.rank, nbytes, next(self.world.numbers))
            address = next(self.world.addresses)
            for _ in range(nbytes // GAP):
                next(self.world.addresses)
            self.maps[address] = (buffer, True)
            self.world.buffers[f"memory {buffer.number}".ljust(64)] = buffer
            return address

    def tensor(self, address, nbytes, owner):
        with self.world.lock:
            self._called("tensor")
            memory = (ctypes.c_char * nbytes).from_address(self.maps[address][0].real)
            memory.owner = owner
            return torch.frombuffer(memory, dtype=torch.uint8)

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
            if address in self.world.segments:
                return f"segment {self.rank} {address}".ljust(64).encode()
            return next(h for h, b in self.world.buffers.items() if b is self.maps[address][0]).encode()

    def open_memory(self, handle):
        with self.world.lock:
            self._called("open_memory")
            if handle.startswith(b"segment"):
                return self._open_segment(handle)
            buffer = self.world.buffers[handle.decode()]
            if self.world.drivers[buffer.owner].process == self.process:
                self.world.wrong(f"rank {self.rank} opens memory of its own process")
                raise RuntimeError("invalid device context")
            if self.world.separate and self.world.drivers[buffer.owner].uuid != self.uuid:
                raise RuntimeError("CUDA_ERROR_INVALID_VALUE: of another GPU instance")
            if buffer.freed:
                self.world.wrong(f"rank {self.rank} opens memory that is freed")
            return self._map(buffer)

    def _map(self, buffer):
        buffer.importers.add(self.rank)
        address = next(self.world.addresses)
        for _ in range(buffer.nbytes // GAP):
            next(self.world.addresses)
        self.maps[address] = (buffer, False)
        return address

    def close_memory(self, address):
        with self.world.lock:
            self._called("close_memory")
            handle = next((h for h, (at, _) in self.opened.items() if at == address), None)
            if handle is not None:
                self.opened[handle][1] -= 1
                if self.opened[handle][1]:
                    return
                del self.opened[handle]
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
