#include "crew.h"

#include <pthread.h>

#include <deque>

#include "condition.h"
#include "waiting.h"

namespace c10d_custom {
namespace {

struct Errand {
  void (*run)(void*);
  void* context;
};

class Crew {
 public:
  int lend(const Errand& errand) {
    std::lock_guard<std::mutex> hold(mutex_);
    errands_.push_back(errand);
    // Each errand has a thread that will look for it next.
    if (errands_.size() <= idle_ + starting_) return changed_.notify_one(), 0;
    std::thread thread;
    if (const int error = start_thread(thread, [this] { serve(); })) return errands_.pop_back(), error;
    thread.detach();
    ++starting_;
    return 0;
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> hold(mutex_);
    --starting_;
    for (;;) {
      if (errands_.empty() && !another_comes(hold)) return;
      const Errand errand = errands_.front();
      errands_.pop_front();
      hold.unlock();
      errand.run(errand.context);
      hold.lock();
    }
  }

  bool another_comes(std::unique_lock<std::mutex>& hold) {
    ++idle_;
    const int64_t until = now_ns() + idle::kThread;
    for (int64_t now; errands_.empty() && (now = now_ns()) < until;) changed_.wait_for(hold, until - now);
    --idle_;
    return !errands_.empty();
  }

  std::mutex mutex_;
  Condition changed_;
  std::deque<Errand> errands_;
  size_t idle_ = 0, starting_ = 0;
};

// Never destroyed: its threads may outlive everything else of the process.
std::atomic<Crew*> crew{nullptr};
const int fork_watch = pthread_atfork(nullptr, nullptr, [] { crew.store(nullptr); });

}  // namespace

int lend_thread(void (*errand)(void*), void* context) {
  (void)fork_watch;
  Crew* ours = crew.load(std::memory_order_acquire);
  if (!ours) {
    auto* const made = new Crew;
    if (crew.compare_exchange_strong(ours, made))
      ours = made;
    else
      delete made;
  }
  return ours->lend({errand, context});
}

}  // namespace c10d_custom
