"""An interprocess event: a stream of another process waits for it, without its host; and what a death does to it."""

from .pair import Pair, probe

BUSY = 0.4
PATIENCE = 4.0  # the work that the event comes after would take twice as long


def recorder(pipe):
    import os
    import time

    from cupy.cuda import runtime

    from .calls import Gpu, interprocess_event, median_us

    gpu, event = Gpu(), interprocess_event()
    address = gpu.allocate()
    pipe.send((bytes(runtime.ipcGetMemHandle(address)), bytes(runtime.ipcGetEventHandle(event)), os.getpid()))
    pipe.recv()
    gpu.spin(BUSY, address, 99)
    runtime.eventRecord(event, gpu.stream.ptr)
    pipe.send("recorded")
    pipe.recv()
    times = []
    for i in range(300):
        began = time.perf_counter()
        runtime.eventRecord(event, gpu.stream.ptr)
        times.append(time.perf_counter() - began)
        pipe.send(i)
        pipe.recv()
    # The last part: recorded after work that this process does not live to see the end of.
    gpu.spin(2 * PATIENCE)
    runtime.eventRecord(event, gpu.stream.ptr)
    pipe.send(median_us(times))
    time.sleep(60)


def waiter(pipe):
    import os
    import signal
    import time

    from cupy.cuda import runtime

    from .calls import Gpu, median_us

    gpu = Gpu()
    memory, handle, pid = pipe.recv()
    address, event = (
        runtime.ipcOpenMemHandle(memory, runtime.cudaIpcMemLazyEnablePeerAccess),
        runtime.ipcOpenEventHandle(handle),
    )
    pipe.send("open")
    pipe.recv()
    began = time.monotonic()
    runtime.streamWaitEvent(gpu.stream.ptr, event)
    found = {"enqueued": time.monotonic() - began, "value": gpu.read(address), "seconds": time.monotonic() - began}
    pipe.send("read")
    times = []
    for _ in range(300):
        pipe.recv()
        started = time.perf_counter()
        runtime.streamWaitEvent(gpu.stream.ptr, event)
        times.append(time.perf_counter() - started)
        gpu.stream.synchronize()
        pipe.send("done")
    found["record_us"], found["wait_us"] = pipe.recv(), median_us(times)
    runtime.streamWaitEvent(gpu.stream.ptr, event)
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    while not gpu.stream.done and time.monotonic() - began < PATIENCE:
        time.sleep(0.001)
    found["after death"] = time.monotonic() - began
    return found


def body():
    pair = Pair(recorder, waiter)
    try:
        found = pair.result(1, 24)
    finally:
        pair.end()
    print(
        f"the wait was enqueued in {found['enqueued'] * 1e6:.0f} us; the value, {found['value']} (99 expected), came "
        "after "
        f"{found['seconds']:.3f} s (the other process was busy for {BUSY} s)"
    )
    print(f"eventRecord takes the host {found['record_us']:.1f} us, streamWaitEvent {found['wait_us']:.1f} us")
    after = found["after death"]
    print(
        "a wait for an event of a process that was killed before it came is "
        + (f"over {after:.3f} s after the death" if after < PATIENCE else f"NOT over {PATIENCE} s after the death")
    )
    wrong = [] if found["value"] == 99 else ["the stream did not wait for the event"]
    return wrong + (["the host waited"] if found["enqueued"] > BUSY / 2 else [])


if __name__ == "__main__":
    probe(body)
