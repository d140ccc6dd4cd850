// Point-to-point messages: non-blocking, matched by (source, tag), in order per (source, tag), never
// waiting for one another.
//
// Each ordered pair of ranks has one ring of cells in the segment, written by the sender of the pair
// and read by the other. Cells:
//   kEager    a whole short message
//   kRequest  a long message is ready: its tag and size
//   kGrant    (back) its receive is posted: send the data
//   kRefuse   (back) its receive does not fit it
//   kData     the next bytes of a granted message
//   kCancel   the sender gave up
//   kWithdraw  it takes the message back, before any of its bytes: as if it had never been
// A rank's engine takes every cell out of its rings as soon as it runs: messages that no receive has
// asked for yet are kept in private memory (a long one is only its request), so a ring never blocks
// behind an unmatched message, and long transfers start only when both sides are in. Hence no order
// of posts can deadlock.
//
// Whoever waits for a message drives the engine; when nobody waits and something is outstanding, a
// helper thread does, so that operations need nothing from the caller to make progress.
#pragma once
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "group.h"
#include "queue.h"
#include "trace.h"

namespace c10d_custom {

class Messenger {
 public:
  explicit Messenger(Group& g);
  ~Messenger();

  Ticket* post(const MessageArgs&);
  // kPending after timeout_ns.
  Status wait(Ticket*, int64_t timeout_ns);
  // The source of the oldest message with this tag that no receive has asked for; -1 if none.
  int probe(int64_t tag);
  // Ends a message here, which must not be under way: see c10d_withdraw.
  Status withdraw(Ticket*);
  // The group aborts or leaves: everything outstanding fails.
  void interrupt();
  void keep_trace(uint32_t messages);
  void trace(std::vector<TraceRecord>& out);

 private:
  enum CellKind : uint32_t { kEager = 1, kRequest, kGrant, kRefuse, kData, kCancel, kWithdraw };

  struct Request {
    Ticket* ticket;
    MessageArgs args;
    uint64_t id;  // sends: names the message to the peer
    int64_t deadline;
    uint64_t moved = 0;   // bytes
    int64_t granted = 0;  // when
    char* data() const { return static_cast<char*>(args.data.data); }
  };
  // A cell waiting for room in the ring to some rank.
  struct Outgoing {
    CellHeader header;
    Request* request;  // kEager: whose bytes go along, and which is done with it
  };
  struct Envelope {
    uint64_t arrival;
    CellHeader header;
    std::vector<char> payload;
  };
  struct Link {             // with one other rank (or this one itself)
    bool reserved = false;  // the cells have their memory
    uint64_t head = 0;      // cells the peer has read, when last looked at: each look fetches its cache line
    std::deque<Outgoing> outbox;
    std::deque<Request*> streams;          // granted, sent one after the other
    std::map<uint64_t, Request*> offered;  // requested, not granted yet
    std::list<Envelope> unexpected;
    std::map<uint64_t, Request*> incoming;  // granted by us
  };

  // Whether progress() may find anything. Without mutex_: a look that takes the lock slows down the other thread of
  // this core, in which the peer may be making what is waited for.
  bool anything_to_do() const;

  // All below: with mutex_ held.
  bool progress();
  bool drain(uint32_t src);
  bool flush(uint32_t dst);
  void handle(uint32_t src, const CellHeader&, const char* payload);
  void deliver(uint32_t src, const CellHeader&, const char* payload, Request*);
  bool match_posted(uint32_t src, const CellHeader&, const char* payload);
  bool match_unexpected(Request*);
  bool push(uint32_t dst, const CellHeader&, const char* payload, uint64_t bytes);
  void send_control(uint32_t dst, uint32_t kind, uint64_t message, const Request* about = nullptr);
  void finish(Request*, Status, int32_t peer, const Failure* detail = nullptr);
  void exhausted(Request*, int error);
  void mismatch(Request*, uint32_t src, uint64_t bytes, uint32_t dtype);
  bool forget(Request*);
  void check_faults();
  void fail_all(Status);
  bool lost(const Request&, int32_t* who);
  // One turn at the engine; sleeps when there is nothing to do, until `until` at the latest.
  void step(std::unique_lock<std::mutex>&, int64_t until);
  void help();

  Group& g_;
  std::mutex mutex_;
  std::condition_variable changed_;  // a request finished, the driver's seat is free
  std::condition_variable helper_cv_;
  std::vector<Link> links_;
  std::list<Request*> posted_;  // receives without a message, in order of posting
  std::vector<Request*> live_;  // every request that is not done
  std::thread helper_;
  CopyIn copy_in_;
  TraceRing trace_;  // of what has ended
  uint64_t next_id_ = 1, arrivals_ = 0;
  int64_t last_post_ = 0, last_check_ = 0;
  unsigned waiters_ = 0;
  bool driving_ = false, helper_idle_ = false, closing_ = false;
  std::atomic<bool> outgoing_{false};  // progress() has left something that waits for room in a ring
};

}  // namespace c10d_custom
