// A condition variable whose waits end by the monotonic clock in every build. The standard library's do so only where
// the C library that it was built for has pthread_cond_clockwait (glibc 2.30); else they wait for a time of day, and a
// clock that is set back makes the wait longer by as much.
#pragma once
#include <mutex>

#include "os.h"

namespace c10d_custom {

// All with the mutex held, always the same. Waits may return early.
class Condition {
 public:
  void wait(std::unique_lock<std::mutex>& hold) { wait_for(hold, INT64_MAX); }
  void wait_for(std::unique_lock<std::mutex>& hold, int64_t ns) {
    const uint32_t seen = turns_.load(std::memory_order_relaxed);
    ++waiting_;
    hold.unlock();
    if (ns > 0) futex_wait(&turns_, seen, ns);
    hold.lock();
    --waiting_;
  }
  void notify_all() { notify(INT_MAX); }
  void notify_one() { notify(1); }

 private:
  void notify(int most) {
    if (!waiting_) return;
    turns_.fetch_add(1, std::memory_order_relaxed);
    futex_wake(&turns_, most);
  }

  std::atomic<uint32_t> turns_{0};
  uint32_t waiting_ = 0;
};

}  // namespace c10d_custom
