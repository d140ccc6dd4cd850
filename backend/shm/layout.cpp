#include "layout.h"

namespace c10d_custom {

Layout::Layout(const Geometry& g) {
  const size_t n = g.ranks, page = 4096;
  table_bytes = align_up(2 * 2 * n * sizeof(uint64_t), kLine);  // two calls; bytes sent, received
  small_bytes = align_up(g.small_bytes, kLine);
  ring_bytes = size_t(g.window) * g.block_bytes;
  pair_rings_bytes = 4 * ring_bytes;  // measured: docs/internals/cost-model.md
  cell_stride = sizeof(CellHeader) + align_up(g.cell_bytes, 64);
  pair_bytes = align_up(g.cells * cell_stride, page);
  ctl = align_up(sizeof(SegmentHeader), page);
  tables = align_up(ctl + n * sizeof(RankCtl), page);
  small = align_up(tables + n * table_bytes, page);
  rings = align_up(small + n * 2 * small_bytes, page);
  board = align_up(rings + n * ring_bytes, page);
  pair_ctl = align_up(board + (n + 1) * g.board_bytes, page);
  pair_rings = align_up(pair_ctl + n * n * sizeof(PairCtl), page);
  pairs = pair_rings + n * pair_rings_bytes;
  arenas = pairs + n * n * pair_bytes;
  total = arenas + n * g.arena_bytes;
}

}  // namespace c10d_custom
