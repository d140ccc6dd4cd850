// Point-to-point messages: non-blocking, matched by (source, tag), in order per (source, tag), never
// waiting for one another.
//
// Each ordered pair of ranks has one ring of cells in the segment, written by the sender of the pair
// and read by the other. Cells:
//   kEager    a whole short message
//   kRequest  a long message is ready, or a short one for which there is no room: its tag and size
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
// A sender counts the bytes of short messages that it has sent whole, the receiver those that it no longer keeps
// (PairCtl::consumed). Where the difference would exceed the pair's room, short messages go as long ones do: they
// wait at their sender, without holding up what goes by other tags.
//
// A message that is taken back was never there: where its receive has been found already, that receive and those after
// it, of the same source and tag, each get the next message (`release`). This is possible as long as none of their
// bytes have come. What is granted is sent in the order of the grants, so none of a later one comes first; a short
// message may overtake (`Pending`).
//
// Whoever waits for a message drives the engine; when nobody waits and something is outstanding, a
// helper thread does, so that operations need nothing from the caller to make progress. Where the machine has no thread
// for it, who sleeps in a collective does it now and then (`aid`), beside those that wait for a message.
//
// A message that nobody waits for keeps nobody waiting, and stays until it is done, its peer is gone or the group ends.
// Its time-out begins with the first wait.
#pragma once
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "condition.h"
#include "group.h"
#include "queue.h"
#include "trace.h"

namespace c10d_custom {

class Messenger {
 public:
  explicit Messenger(Group& g);
  ~Messenger();

  Ticket* post(const MessageArgs&);
  // kPending after timeout_ns. Its own time-out runs from the first wait for it, be it of no ns.
  Status wait(Ticket*, int64_t timeout_ns);
  // The source of the oldest message with this tag that no receive has asked for; -1 if none.
  int probe(int64_t tag);
  // Ends a message here, which must not be under way: see c10d_withdraw.
  Status withdraw(Ticket*);
  // Drives the engine a little, if something is outstanding and there is no helper. Whether that is so.
  bool aid();
  // The group aborts or leaves: everything outstanding fails.
  void interrupt();
  void keep_trace(uint32_t messages);
  void trace(std::vector<TraceRecord>& out);

 private:
  enum CellKind : uint32_t { kEager = 1, kRequest, kGrant, kRefuse, kData, kCancel, kWithdraw };

  struct Request;
  // A cell waiting for room in the ring to some rank, of a message; kEager: its bytes go along, and it is done with it.
  struct Outgoing {
    CellHeader header;
    Request* request;
  };
  struct Request {
    Ticket* ticket;
    MessageArgs args;
    uint64_t id;                   // of all that this rank has posted, in order; sends: names the message to the peer
    int64_t wanted = 0;            // when it was first waited for
    int64_t deadline = INT64_MAX;  // from then on
    uint64_t moved = 0;            // bytes
    int64_t granted = 0;           // when
    enum { kElsewhere, kUnsent, kOffered, kStreams, kPosted, kGranted } place = kElsewhere;
    bool counted = false;                        // in the `live` of its peer's link, or in any_
    bool pending = false;                        // counted in a Pending
    uint32_t source = 0;                         // kGranted: whose message it gets
    uint64_t message = 0;                        // and which
    std::list<Request>::iterator among_live{};   // itself
    std::list<Outgoing>::iterator unsent{};      // kUnsent
    std::list<Request*>::iterator in_streams{};  // kStreams
    char* data() const { return static_cast<char*>(args.data.data); }
  };
  struct Envelope {
    CellHeader header;
    std::vector<char> payload;
  };
  using PostedKey = std::tuple<int64_t, int32_t, uint64_t>;  // tag, peer or -1, id
  using EarlyKey = std::tuple<int64_t, uint32_t, uint64_t>;  // tag, source, order of arrival
  using Unexpected = std::map<EarlyKey, Envelope>;
  // Messages of one tag that may still be taken back, since none of their bytes have moved. At the receiver: those that
  // it has granted; `overtook`: short ones that came meanwhile, to later receives. At the sender: short ones that it
  // has announced instead of sending them whole. While there are any, later short ones of that tag are announced as
  // well, so that none overtakes.
  struct Pending {
    uint32_t messages = 0;
    std::vector<CellHeader> overtook;
  };
  struct Link {                       // with one other rank (or this one itself)
    bool reserved = false;            // the cells have their memory
    uint64_t head = 0;                // cells the peer has read, when last looked at: each look fetches its cache line
    uint64_t charged = 0;             // bytes of short messages to it: see room_for
    uint64_t credited = 0;            // those that it no longer keeps, when last looked at
    uint64_t consumed = 0;            // of those from it
    uint32_t live = 0;                // requests that name it as their peer
    bool gone = false;                // at the last look of check_faults; no further send to it succeeds
    std::deque<CellHeader> controls;  // sent before all else
    std::list<Outgoing> outbox;
    std::list<Request*> streams;            // granted, sent one after the other
    std::map<uint64_t, Request*> offered;   // announced to the peer, by id, until all bytes have gone
    std::map<uint64_t, Request*> incoming;  // granted by us, by the peer's id
    std::unordered_map<uint64_t, Unexpected::iterator> announced;  // those of unexpected_ that are kRequests
    std::map<int64_t, Pending> pending_out, pending_in;            // by tag
  };

  // The oldest message with that tag from one of those sources, or end().
  static Unexpected::iterator oldest(Unexpected&, int64_t tag, uint32_t first_source, uint32_t end);

  // Whether progress() may find anything. Without mutex_: a look that takes the lock slows down the other thread of
  // this core, in which the peer may be making what is waited for.
  bool anything_to_do() const;
  // Whether that rank may have sent something: else there are no cells to look at.
  bool hears_of(uint32_t src) const { return g_.has_cells(src, g_.rank).load(std::memory_order_seq_cst); }

  // All below: with mutex_ held.
  bool progress();
  // With whom the newest request is; this rank, where that may be anyone.
  uint32_t awaited() const;
  bool drain(uint32_t src);
  bool flush(uint32_t dst);
  bool flush_cells(uint32_t dst);
  void handle(uint32_t src, const CellHeader&, const char* payload);
  void deliver(uint32_t src, const CellHeader&, const char* payload, Request*);
  void receive_granted(uint32_t src, uint64_t message, Request*, int64_t granted);
  Request* posted_for(uint32_t src, int64_t tag);
  void await_message(Request*);
  bool match_unexpected(Request*);
  void taken_back(uint32_t src, uint64_t message, bool withdrawn);
  void release(uint32_t src, uint64_t message, Request*);
  bool push(uint32_t dst, const CellHeader&, const char* payload, uint64_t bytes);
  void send_control(uint32_t dst, uint32_t kind, uint64_t message, const Request* about = nullptr);
  bool room_for(uint32_t dst, uint64_t bytes);
  void consume(uint32_t src, uint64_t bytes);
  void count_pending(Request*, std::map<int64_t, Pending>&);
  void settle(Request*);
  void want(Request*);
  void finish(Request*, Status, int32_t peer, const Failure* detail = nullptr);
  void exhausted(Request*, int error);
  void mismatch(Request*, uint32_t src, uint64_t bytes, uint32_t dtype);
  bool forget(Request*);
  void check_faults();
  // Asks after each rank that something here waits for, once. Whether any is gone.
  bool look_at_peers();
  void fail_all(Status);
  // As that look has found.
  bool lost(const Request&, int32_t* who) const;
  // One turn at the engine; sleeps when there is nothing to do, until `until` at the latest.
  void step(std::unique_lock<std::mutex>&, int64_t until);
  void help();

  Group& g_;
  std::mutex mutex_;
  Condition changed_;  // a request finished, the driver's seat is free
  Condition helper_cv_;
  std::vector<Link> links_;
  std::map<PostedKey, Request*> posted_;  // receives without a message
  Unexpected unexpected_;                 // messages without a receive
  std::list<Request> live_;               // every request that is not done, in order of posting
  uint32_t any_ = 0;                      // of them, receives from any source
  CopyIn copy_in_;
  TraceRing trace_;  // of what has ended
  uint64_t next_id_ = 1, arrivals_ = 0;
  int64_t last_post_ = 0, last_check_ = 0;
  int64_t due_ = INT64_MAX;  // no deadline in live_ comes sooner
  unsigned waiters_ = 0;
  bool driving_ = false, has_helper_ = false, closing_ = false;
  std::atomic<bool> unaided_{false};   // the machine had no thread for the helper, and something is outstanding
  std::atomic<bool> outgoing_{false};  // progress() has left something that waits for room in a ring
};

}  // namespace c10d_custom
