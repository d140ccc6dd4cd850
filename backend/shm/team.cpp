#include "team.h"

#include <algorithm>

#include "waiting.h"

namespace c10d_custom {

Team::~Team() {
  closing_.store(true, std::memory_order_seq_cst);
  rings_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&rings_);
  for (std::thread& helper : helpers_) helper.join();
}

// Helpers of this rank that are awake look busy, and are free for this call: their cores count as idle. Those of other
// ranks on the same cores are not known: each is taken to have as many. What else runs, as the program's own threads,
// keeps its core.
uint32_t Team::size_by_load() {
  if (allowed_) {
    const TeamSize allowed = allowed_();
    size_ = allowed.threads, sharers_ = allowed.sharers;
    allowed_ = nullptr;
  }
  if (size_ < 2) return 1;
  const long awake = long(helpers_.size()) - long(sleepers_.load(std::memory_order_relaxed));
  const long idle = idle_() + awake * long(sharers_);
  return idle < 1 ? 1 : uint32_t(std::min(long(size_), 1 + idle / long(sharers_)));
}

// How many parts, at most one for each thread that there is.
uint32_t Team::cut(uint64_t bytes) {
  while (helpers_.size() + 1 < now_) {
    helpers_.emplace_back();
    if (start_thread(helpers_.back(), [this] { help(); })) {  // this machine gives no more: then fewer
      helpers_.pop_back();
      size_ = now_ = uint32_t(helpers_.size()) + 1;
    }
  }
  return uint32_t(std::min<uint64_t>(now_, bytes / kLeast));
}

void Team::reduce(ReduceFn kernel, void* to, const void* const* src, uint32_t nsrc, uint64_t bytes, uint64_t item,
                  const double* factor) {
  share(bytes, [&](uint64_t at, uint64_t end) {
    if (!at && end == bytes) return kernel(to, src, nsrc, bytes / item, factor);
    std::vector<const void*> from(src, src + nsrc);
    for (const void*& each : from) each = static_cast<const char*>(each) + at;
    kernel(static_cast<char*>(to) + at, from.data(), nsrc, (end - at) / item, factor);
  });
}

void Team::run(uint32_t parts, Part part, const void* context) {
  part_.store(part, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  const uint64_t number = (job_.load(std::memory_order_relaxed) >> 32) + 1;
  // Pairs with help(): either a helper sees the job before it sleeps, or it is seen to sleep.
  job_.store(number << 32 | parts, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst)) {
    rings_.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(&rings_);
  }
  while (take_one()) {
  }
  wait_for_a_part([&] { return done_.load(std::memory_order_acquire) >= parts; });
}

// Does a part that nobody has taken; false where there is none.
bool Team::take_one() {
  uint64_t job = job_.load(std::memory_order_acquire);
  for (;;) {
    if (!uint32_t(job)) return false;
    const Part part = part_.load(std::memory_order_relaxed);
    const void* const context = context_.load(std::memory_order_relaxed);
    if (!job_.compare_exchange_weak(job, job - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    part(context, uint32_t(job) - 1);
    done_.fetch_add(1, std::memory_order_acq_rel);
    return true;
  }
}

void Team::help() {
  int64_t until = 0;
  while (!closing_.load(std::memory_order_acquire)) {
    if (take_one()) {
      until = 0;
      continue;
    }
    const int64_t now = now_ns();
    if (!until) until = now + idle::kPartAwake;
    if (now < until) {
      for (int i = 0; i < 32; ++i) cpu_relax();
      continue;
    }
    const uint32_t seen = rings_.load(std::memory_order_seq_cst);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const bool idle = !uint32_t(job_.load(std::memory_order_seq_cst)) && !closing_.load(std::memory_order_seq_cst);
    if (idle) futex_wait(&rings_, seen, INT64_MAX);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    until = 0;
  }
}

}  // namespace c10d_custom
