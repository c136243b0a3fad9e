#include "avx512.h"

namespace tp {

const Isa avx512_isa = {"avx512", packed_bytes, pack, dots_of_any, activate, add_scaled, store, load, read, attend, nullptr};

}  // namespace tp
