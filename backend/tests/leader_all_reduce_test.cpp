// Small all_reduces over two hosts of two ranks: each rank is a thread, a host's call slots are ordinary memory, and
// MPI is a mailbox for each direction. Sums of random lengths against what they must be, while another thread reads the
// log; then a rank that calls something else, a leader that was stopped, one that has news to read, and waits that
// last.
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "../hosts/call_slots.h"
#include "../hosts/leader_all_reduce.h"
#include "os.h"
#include "reduce.h"
#include "require.h"

using namespace c10d_custom;

namespace {

constexpr uint32_t kHosts = 2, kLocal = 2;
constexpr uint64_t kLimit = 4096, kStride = CallSlots::kPayload + kLimit;
constexpr uint64_t kKind = kInt64 | kSum << 8 | 8 << 16 | kAllReduce << 24;
constexpr int64_t kMs = 1000000;

struct Mailbox {
  std::mutex mutex;
  std::deque<std::vector<char>> messages;
};

struct Request {
  Mailbox* box;
  char* buffer;
  uint64_t bytes;
  bool sends, active;
};

int startall(int n, void* requests) {
  for (Request* r = static_cast<Request*>(requests); n--; ++r) {
    r->active = !r->sends;
    if (!r->sends) continue;
    std::lock_guard<std::mutex> lock(r->box->mutex);
    r->box->messages.emplace_back(r->buffer, r->buffer + r->bytes);
  }
  return 0;
}

int testall(int n, void* requests, int* done, void*) {
  *done = 1;
  for (Request* r = static_cast<Request*>(requests); n--; ++r) {
    if (!r->active) continue;
    std::lock_guard<std::mutex> lock(r->box->mutex);
    if (r->box->messages.empty()) {
      *done = 0;
      continue;
    }
    require(r->box->messages.front().size() == r->bytes, "a message of another length", 0);
    memcpy(r->buffer, r->box->messages.front().data(), r->bytes);
    r->box->messages.pop_front();
    r->active = false;
  }
  return 0;
}

struct Network {
  Mailbox to[kHosts];
  std::vector<uint64_t> call_slots[kHosts];
  Network() {
    for (auto& b : call_slots) b.assign((kLocal + 1) * kStride / 8, 0);
  }
};

struct Rank {
  const uint32_t host, local;
  LeaderAllReduce way{};
  LeaderFastPath fast_path{};
  std::vector<char> messages[kHosts];
  char* between[kHosts];
  Request requests[kLengths][2];
  LeaderCall calls[kLengths]{};
  std::vector<LeaderCall*> table;
  TraceRecord log[4]{};

  Rank(Network& network, uint32_t h, uint32_t l) : host(h), local(l), table((kBool + 20) * kRedopRoom * kLengths) {
    for (uint32_t i = 0; i < kHosts; ++i)
      messages[i].resize(sizeof(CallHeader) + kLimit), between[i] = messages[i].data();
    way.startall = startall, way.testall = testall;
    way.call_slots = network.call_slots[host].data(), way.stride = kStride, way.ranks = kLocal, way.local = local;
    way.between = between, way.nbetween = kHosts, way.own_between = host;
    way.awake_ns = 200 * 1000;
    fast_path.limit = kLimit, fast_path.way = &way, fast_path.calls = table.data();
    fast_path.log = log, fast_path.room = 4;
    for (uint32_t i = 0; i < kLengths; ++i) {
      const uint64_t bytes = fast_path.lengths[i] = kLimit >> 2 * (kLengths - 1 - i);
      requests[i][0] = {&network.to[1 - host], between[host], sizeof(CallHeader) + bytes, true, false};
      requests[i][1] = {&network.to[host], between[1 - host], sizeof(CallHeader) + bytes, false, false};
      LeaderCall& call = calls[i];
      call.header.op = 3, call.header.redop = kSum, call.header.dtype = kInt64, call.header.root = -1;
      call.requests = requests[i], call.nrequests = local ? 0 : 2;
      call.inside_op = call.between_op = kSum;
      table[(kInt64 * kRedopRoom + kSum) * kLengths + i] = &call;
    }
  }

  int all_reduce(int64_t* data, uint64_t count, int64_t patience) {
    int status = c10d_leader_fast_path(&fast_path, kKind, -1, data, data, count, kMs / 10);
    for (int64_t waited = 0; status == kPending && waited < patience; waited += kMs)
      status = c10d_leader_all_reduce(&way, fast_path.now, kMs);
    if (fast_path.now) c10d_leader_fast_path_over(&fast_path, status);
    return status;
  }
};

void sums(Rank& rank, uint64_t calls) {
  const int64_t world = kHosts * kLocal, me = rank.host * kLocal + rank.local;
  uint64_t random = 7;  // the same on all ranks
  std::vector<int64_t> data(kLimit / 8);
  for (uint64_t call = 1; call <= calls; ++call) {
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    const uint64_t count = 1 + (random >> 33) % data.size();
    for (uint64_t i = 0; i < count; ++i) data[i] = int64_t(call * 1000 + i) * (me + 1);
    require(rank.all_reduce(data.data(), count, 60000 * kMs) == kOk, "no success", call);
    for (uint64_t i = 0; i < count; ++i)
      require(data[i] == int64_t(call * 1000 + i) * (world * (world + 1) / 2), "a wrong sum", call);
  }
}

void odd_one(Rank& rank) {
  int64_t data[8] = {};
  const bool odd = rank.host == 1 && rank.local == 1;
  const int status = rank.all_reduce(data, odd ? 7 : 8, 1000 * kMs);
  // Its own host's leader knows, and with that it; the other host never hears of it, and waits in vain.
  require(status == (rank.host ? kMismatch : kPending), "a mismatch went unnoticed", 0);
}

// The leader's host was ready while the leader was stopped: it does not speak to the other host before it has looked.
void stopped() {
  Network network;
  Rank leader(network, 0, 0), other(network, 0, 1);
  int64_t data[2][8] = {};
  auto call = [&](Rank& r, int64_t ns) {
    return c10d_leader_fast_path(&r.fast_path, kKind, -1, data[r.local], data[r.local], 8, ns);
  };
  require(call(other, 0) == kPending, "nobody to wait for", 1);
  require(call(leader, -2000 * kMs) == kPending && network.to[1].messages.empty(), "a transfer after a stop", 1);
  require(c10d_leader_all_reduce(&leader.way, leader.fast_path.now, kMs) == kPending, "no peer, and yet done", 1);
  require(network.to[1].messages.size() == 1, "no transfer", 1);
  for (Rank* r : {&leader, &other}) c10d_leader_fast_path_over(&r->fast_path, kTimeout);
}

// Nor while there is news that it has not read, or has not acted on.
void alarmed() {
  Network network;
  Rank leader(network, 0, 0), other(network, 0, 1);
  int news[2];
  require(pipe(news) == 0 && write(news[1], "x", 1) == 1, "no pipe", 0);
  FailureNews failure_news{news[0], {0}};
  leader.way.failure_news = &failure_news;
  int64_t data[2][8] = {};
  auto call = [&](Rank& r) {
    return c10d_leader_fast_path(&r.fast_path, kKind, -1, data[r.local], data[r.local], 8, kMs);
  };
  auto nothing_sent = [&] {
    return c10d_leader_all_reduce(&leader.way, leader.fast_path.now, kMs) == kPending && network.to[1].messages.empty();
  };
  require(call(other) == kPending && call(leader) == kPending && nothing_sent(), "a transfer before the news", 1);
  failure_news.kept = 1;
  char c;
  require(read(news[0], &c, 1) == 1 && nothing_sent(), "a transfer amid the news", 1);
  failure_news.kept = 0;
  require(!nothing_sent() && network.to[1].messages.size() == 1, "no transfer", 1);
  for (Rank* r : {&leader, &other}) c10d_leader_fast_path_over(&r->fast_path, kTimeout);
  for (int fd : news) close(fd);
}

// A long wait sleeps: whoever is late may need the core.
void sleeps() {
  Network network;
  Rank leader(network, 0, 0), other(network, 0, 1);
  int64_t data[2][8] = {};
  for (Rank* r : {&other, &leader}) {
    rusage before, after;
    getrusage(RUSAGE_THREAD, &before);
    int status = c10d_leader_fast_path(&r->fast_path, kKind, -1, data[r->local], data[r->local], 8, kMs);
    do {
      require(status == kPending, "nobody to wait for", 1);
      status = c10d_leader_all_reduce(&r->way, r->fast_path.now, 10 * kMs);
      getrusage(RUSAGE_THREAD, &after);
      require(now_ns() - r->fast_path.began < 20000 * kMs, "no sleep in 20 s", 1);
    } while (after.ru_nvcsw < before.ru_nvcsw + 3);  // a yield is none of these
  }
  require(leader.fast_path.now->step == 2, "the leader does not wait for another host", 1);
  for (Rank* r : {&leader, &other}) c10d_leader_fast_path_over(&r->fast_path, kTimeout);
}

template <class Work>
void together(std::vector<Rank*>& ranks, Work work) {
  std::vector<std::thread> threads;
  for (Rank* r : ranks) threads.emplace_back([r, &work] { work(*r); });
  for (std::thread& t : threads) t.join();
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t calls = 50 * (argc > 1 ? strtoull(argv[1], nullptr, 10) : 40);
  Network network;
  std::vector<Rank*> ranks;
  for (uint32_t i = 0; i < kHosts * kLocal; ++i) ranks.push_back(new Rank(network, i / kLocal, i % kLocal));
  std::atomic<bool> over{false};
  std::thread reader([&] {
    while (!over) {
      TraceRecord seen[4];
      const uint64_t n = c10d_leader_fast_path_log(&ranks[0]->fast_path, seen);
      for (uint64_t i = 0; i < n; ++i)
        require(seen[i].number && seen[i].count * 8 == seen[i].in_bytes && seen[i].dtype == kInt64, "a torn record",
                seen[i].number);
      std::this_thread::yield();
    }
  });
  together(ranks, [&](Rank& r) { sums(r, calls); });
  over = true;
  reader.join();
  together(ranks, odd_one);
  for (Rank* r : ranks) delete r;
  stopped();
  alarmed();
  sleeps();
  std::puts("leader_all_reduce_test: ok");
}
