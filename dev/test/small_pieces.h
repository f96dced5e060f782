// small_pieces.h: for tests, included before everything else: work that is done in pieces is done in small ones, most of
// them of odd sizes, so that loops over pieces turn more than once with small models too, and end anywhere.

#define LLMTRAIN_PIECE(size, small) (small)
