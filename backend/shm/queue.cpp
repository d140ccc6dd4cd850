#include "queue.h"

#include <algorithm>

#include "collective.h"
#include "crew.h"

namespace c10d_custom {
using namespace idle;

Status Ticket::wait(int64_t timeout_ns) {
  const int64_t until = deadline_after(now_ns(), timeout_ns);
  for (int i = 0; i < 200; ++i) {
    if (state() != kPending) return state();
    cpu_relax();
  }
  // Who ends it looks for sleepers after it has set the status, and the kernel looks at the status before it lets one
  // sleep.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (state() == kPending) {
    const int64_t left = until - now_ns();
    if (left <= 0) break;
    futex_wait(&status_, kPending, left);
  }
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return state();
}

void Ticket::finish(Status st, const Failure& f, CompletionQueue& completed) {
  failure = f;
  status_.store(uint32_t(st), std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst)) futex_wake_all(&status_);
  if (const uint64_t token = token_.exchange(0, std::memory_order_seq_cst)) completed.push(token);
}

Status Ticket::watch(uint64_t token) {
  token_.store(token, std::memory_order_seq_cst);
  const Status st = Status(status_.load(std::memory_order_seq_cst));
  if (st == kPending || token_.exchange(0, std::memory_order_seq_cst) == 0) return kPending;
  return st;
}

void CompletionQueue::push(uint64_t token) {
  std::lock_guard<std::mutex> hold(mutex_);
  done_.push_back(token);
  changed_.notify_one();
}

Status CompletionQueue::pop(int64_t timeout_ns, uint64_t* token) {
  std::unique_lock<std::mutex> hold(mutex_);
  const int64_t until = deadline_after(now_ns(), timeout_ns);
  while (done_.empty()) {
    if (closed_) return kAborted;
    const int64_t left = until - now_ns();
    if (left <= 0) return kPending;
    changed_.wait_for(hold, left);
  }
  *token = done_.front();
  done_.pop_front();
  return kOk;
}

void CompletionQueue::close() {
  std::lock_guard<std::mutex> hold(mutex_);
  closed_ = true;
  changed_.notify_all();
}

CollectiveQueue::~CollectiveQueue() {
  std::unique_lock<std::mutex> hold(mutex_);
  closing_ = true;
  changed_.notify_all();
  while (has_worker_) changed_.wait(hold);
}

void CollectiveQueue::drain() {
  std::unique_lock<std::mutex> hold(mutex_);
  while (busy_ || !jobs_.empty())
    if (!busy_ && !has_worker_)
      run_next(hold);
    else
      changed_.wait(hold);
  completed.close();
}

uint64_t CollectiveQueue::next_seq() {
  std::lock_guard<std::mutex> hold(mutex_);
  return seq_ + 1;
}

void CollectiveQueue::keep_trace(uint32_t calls) {
  std::lock_guard<std::mutex> hold(mutex_);
  trace_.keep(calls);
}

void CollectiveQueue::trace(std::vector<TraceRecord>& out) {
  std::lock_guard<std::mutex> hold(mutex_);
  trace_.read(out);
  for (const Job& job : jobs_) out.push_back(trace_record(job.args, job.ticket->seq, job.ticket->started, 0));
}

Status CollectiveQueue::run(const CallArgs& args, Failure* failure) {
  std::unique_lock<std::mutex> hold(mutex_);
  if (busy_ || !jobs_.empty()) {
    Ticket* t = enqueue(args, hold);
    hold.unlock();
    Status st;
    bool interrupted = false;
    while ((st = wait(t, interrupted ? INT64_MAX : kPollInterrupt, true)) == kPending)
      if (g_.interrupted && main_thread() && g_.interrupted()) {
        interrupted = true;
        g_.abort(kInterrupted);  // ends it: the caller's buffers must not be touched after we return
      }
    if (st != kOk) *failure = t->failure;
    if (interrupted) failure->status = st = kInterrupted;
    t->drop();
    return st;
  }
  busy_ = true;
  const uint64_t seq = ++seq_;
  const int64_t now = now_ns();
  TraceRecord* record = trace_.begin(trace_record(args, seq, now, now));
  hold.unlock();
  const Status st = Collective(g_, seq, args, now, failure).run();
  hold.lock();
  TraceRing::end(record, st);
  busy_ = false;
  announce_next();
  tell_after_a_call();
  return st;
}

Ticket* CollectiveQueue::submit(const CallArgs& args) {
  std::unique_lock<std::mutex> hold(mutex_);
  return enqueue(args, hold);
}

Ticket* CollectiveQueue::enqueue(const CallArgs& args, std::unique_lock<std::mutex>&) {
  auto* t = new Ticket(now_ns());
  t->seq = ++seq_;
  Failure none;
  const bool small = Collective(g_, t->seq, args, 0, &none).is_small();
  Job job{args, {}, t, small, false};
  job.spans.assign(args.in, args.in + args.nin);
  job.spans.insert(job.spans.end(), args.out, args.out + args.nout);
  job.args.in = job.spans.data(), job.args.out = job.args.in + args.nin;  // stays there as the job is moved
  jobs_.push_back(std::move(job));
  last_submit_ = t->started;
  looks_until_ = small ? t->started + kLinger : 0;
  if (!small) urgent_ = t->seq;
  if (!has_worker_) has_worker_ = !lend_thread([](void* me) { static_cast<CollectiveQueue*>(me)->work(); }, this);
  announce_next();
  if (urgent() || worker_sleeps_) changed_.notify_all();
  return t;
}

void CollectiveQueue::run_ready(Ticket* t) {
  std::unique_lock<std::mutex> hold(mutex_);
  const int64_t until = now_ns() + kHardly;
  while (t->state() == kPending && !busy_ && !jobs_.empty() && jobs_.front().announced) {
    if (next_is_ready())
      run_next(hold);
    else if (now_ns() >= until)
      return;
    else
      for (int i = 0; i < 16; ++i) cpu_relax();
  }
}

Status CollectiveQueue::watch(Ticket* t, uint64_t token) {
  run_ready(t);
  std::unique_lock<std::mutex> hold(mutex_);
  while (!has_worker_ && t->state() == kPending && !busy_ && !jobs_.empty()) run_next(hold);
  const Status st = t->watch(token);
  if (st != kPending) return st;
  urgent_ = std::max(urgent_, t->seq);
  if (!busy_ && urgent()) changed_.notify_all();
  return kPending;
}

Status CollectiveQueue::wait(Ticket* t, int64_t timeout_ns, bool may_run) {
  if (!may_run && t->state() == kPending) {
    std::unique_lock<std::mutex> hold(mutex_);
    may_run = !has_worker_;
  }
  if (may_run && t->state() == kPending) {
    std::unique_lock<std::mutex> hold(mutex_);
    while (t->state() == kPending && !busy_ && !jobs_.empty()) run_next(hold);
    while (!busy_ && next_is_ready()) run_next(hold);
  }
  return t->wait(timeout_ns);
}

void CollectiveQueue::run_next(std::unique_lock<std::mutex>& hold) {
  Job job = std::move(jobs_.front());
  jobs_.pop_front();
  busy_ = true;
  const int64_t now = now_ns();
  TraceRecord* record = trace_.begin(trace_record(job.args, job.ticket->seq, job.ticket->started, now));
  hold.unlock();
  Failure failure{};
  Collective call(g_, job.ticket->seq, job.args, now, &failure);
  const Status st = job.announced ? call.go_on() : call.run();
  hold.lock();
  TraceRing::end(record, st);  // before anyone can report the failure
  job.ticket->finish(st, failure, completed);
  job.ticket->drop();
  busy_ = false;
  announce_next();
  tell_after_a_call();
}

void CollectiveQueue::announce_next() {
  if (busy_ || jobs_.empty() || !jobs_.front().small || jobs_.front().announced) return;
  Job& next = jobs_.front();
  Failure none;
  next.announced = Collective(g_, next.ticket->seq, next.args, 0, &none).announce_early();
}

bool CollectiveQueue::next_is_ready() const {
  if (jobs_.empty() || !jobs_.front().announced) return false;
  if (g_.tree.in_use()) return g_.all_have_come();
  for (uint32_t r = 0; r < g_.n; ++r)
    if (g_.ctl(r).arrive.value.load(std::memory_order_acquire) < jobs_.front().ticket->seq) return false;
  return true;
}

// The worker, and who drains.
void CollectiveQueue::tell_after_a_call() {
  if (urgent() || closing_ || g_.aborted()) changed_.notify_all();
}

void CollectiveQueue::work() {
  std::unique_lock<std::mutex> hold(mutex_);
  for (;;) {
    int64_t look = kGrace;  // in so many ns
    if (!busy_) {
      if (jobs_.empty() && closing_) break;
      const int64_t age = jobs_.empty() ? 0 : now_ns() - jobs_.front().ticket->started;
      if (urgent() || (!jobs_.empty() && (age >= kGrace || g_.aborted()))) {
        run_next(hold);
        continue;
      }
      look -= age;
    }
    if (jobs_.empty()) {
      const int64_t now = now_ns(), left = last_submit_ + kKeep - now;
      if (left <= 0) break;
      worker_sleeps_ = now > looks_until_;
      if (worker_sleeps_) look = left;
    }
    changed_.wait_for(hold, look);
    worker_sleeps_ = false;
  }
  has_worker_ = false;
  changed_.notify_all();  // who closes waits for this
}

}  // namespace c10d_custom
