// What this process does with MPI, counted for the thread that sees to it that what it sends leaves
// (hosts/mpi_driver.h), where there is one.
#pragma once
#include "../shm/os.h"

namespace c10d_custom {

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

}  // namespace c10d_custom
