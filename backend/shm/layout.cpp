#include "layout.h"

namespace c10d_custom {
namespace {

size_t counters_of_tree(const Geometry& g) {
  size_t sum = 0;
  for (size_t width = g.fan_in > 1 ? g.ranks : 1; width > 1; sum += width) width = (width + g.fan_in - 1) / g.fan_in;
  return sum;
}

}  // namespace

Layout::Layout(const Geometry& g) {
  const size_t n = g.ranks, page = 4096;
  table_bytes = align_up(2 * 3 * n * sizeof(uint64_t), kLine);  // two calls; see Group::table
  small_bytes = align_up(g.small_bytes, kLine);
  ring_bytes = size_t(g.window) * g.block_bytes;
  pair_rings_bytes = 4 * ring_bytes;  // measured: docs/internals/cost-model.md
  cell_stride = sizeof(CellHeader) + align_up(g.cell_bytes, 64);
  flow_bytes = align_up(n * sizeof(Flow), page);
  pair_bytes = align_up(sizeof(PairCtl) + g.cells * cell_stride, page);
  ctl_bytes = n >= kManyRanks ? align_up(sizeof(RankCtl), page) : sizeof(RankCtl);
  tree = align_up(sizeof(SegmentHeader), kLine);
  ctl = align_up(tree + counters_of_tree(g) * sizeof(TreeCounter), page);
  has_cells = align_up(ctl + n * ctl_bytes, kLine);
  call_slots = align_up(has_cells + n * n, page);
  tables = align_up(call_slots + (n + 1) * g.call_slot_bytes, page);
  small = align_up(tables + n * table_bytes, page);
  rings = align_up(small + n * 2 * small_bytes, page);
  flows = align_up(rings + n * ring_bytes, page);
  pairs = flows + n * (flow_bytes + pair_rings_bytes);
  arenas = pairs + n * n * pair_bytes;
  total = arenas + n * g.arena_bytes;
}

}  // namespace c10d_custom
