#include "layout.h"

namespace c10d_custom {

Layout::Layout(const Geometry& g) {
  const size_t n = g.ranks, page = 4096;
  table_bytes = align_up(2 * 2 * n * sizeof(uint64_t), kLine);  // two calls; bytes sent, received
  small_bytes = align_up(g.small_bytes, kLine);
  ring_bytes = size_t(g.window) * g.block_bytes;
  pair_rings_bytes = 4 * ring_bytes;  // measured: docs/internals/cost-model.md
  cell_stride = sizeof(CellHeader) + align_up(g.cell_bytes, 64);
  flow_bytes = align_up(n * sizeof(Flow), page);
  pair_bytes = align_up(sizeof(PairCtl) + g.cells * cell_stride, page);
  ctl = align_up(sizeof(SegmentHeader), page);
  has_cells = align_up(ctl + n * sizeof(RankCtl), kLine);
  board = align_up(has_cells + n * n, page);
  tables = align_up(board + (n + 1) * g.board_bytes, page);
  small = align_up(tables + n * table_bytes, page);
  rings = align_up(small + n * 2 * small_bytes, page);
  flows = align_up(rings + n * ring_bytes, page);
  pairs = flows + n * (flow_bytes + pair_rings_bytes);
  arenas = pairs + n * n * pair_bytes;
  total = arenas + n * g.arena_bytes;
}

}  // namespace c10d_custom
