// What this process has begun to send to other hosts, counted for the thread that sees to it that it leaves
// (hosts/mpi_driver.h), where there is one.
#pragma once
#include "os.h"

namespace c10d_custom {

struct Transfers {
  std::atomic<uint32_t> driven{0};  // there is such a thread
  std::atomic<uint32_t> begun{0};
  std::atomic<uint32_t> asleep{0};  // a futex: the thread sleeps for long, and is to be woken
};

inline Transfers transfers;  // the process's

// Called before each transfer.
inline void transfer_begins() {
  if (!transfers.driven.load(std::memory_order_relaxed)) return;
  transfers.begun.fetch_add(1);
  if (transfers.asleep.load() && transfers.asleep.exchange(0)) futex_wake_all(&transfers.asleep);
}

}  // namespace c10d_custom
