// The thread that drives MPI while the program does not. Over libfabric, MPI may say that a send is done while it still
// holds the bytes: until there is a connection, say, or until the peer reads on. They leave only while somebody calls
// MPI. The program may not: it computes, or waits by other means for the very peer that waits for those bytes.
//
// MPI does not tell when the last bytes have left. So the thread goes on calling it as long as there is MPI. It stays
// out of the way while the process itself calls MPI; it calls often just after that, and then more and more rarely.
#pragma once
#include "../shm/api.h"
#include "../shm/os.h"

namespace c10d_custom {

// What this process does with MPI, counted for that thread.
struct Transfers {
  std::atomic<uint32_t> driven{0};  // there is such a thread
  std::atomic<uint32_t> calls{0};   // not all: enough to tell whether there are any
  std::atomic<uint32_t> asleep{0};  // a futex: the thread sleeps for long, and is to be woken
};

inline Transfers transfers;  // the process's

// In a wait, now and then: whoever waits for MPI drives it.
inline void mpi_is_called() {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  if (transfers.driven.load(kRelaxed)) transfers.calls.store(transfers.calls.load(kRelaxed) + 1, kRelaxed);
}

// Before each transfer.
inline void transfer_begins() {
  if (!transfers.driven.load(std::memory_order_relaxed)) return;
  transfers.calls.fetch_add(1);
  if (transfers.asleep.load() && transfers.asleep.exchange(0)) futex_wake_all(&transfers.asleep);
}

// MPI_Iprobe, and arguments that no message of ours fits. MPI's handles are ints or pointers, and either passes for an
// intptr_t.
struct MpiDriver {
  int (*iprobe)(int source, int tag, intptr_t comm, int* flag, void* status);
  intptr_t comm;
  int64_t source, tag;
};

}  // namespace c10d_custom

// Starts it, once in a process. 0, or errno.
C10D_API int c10d_drive_mpi(const c10d_custom::MpiDriver*);
// Ends it: it calls MPI no more once this has returned. Nothing, in a process that has none, a forked child for one.
C10D_API void c10d_end_mpi_driver();
// The two above.
C10D_API void c10d_transfer_begins();
C10D_API void c10d_mpi_is_called();
