#include "avx512.h"

namespace tp {

const Isa amx_isa = {"amx", parts, packed_bytes, pack, dots_of_any, activate, add_scaled, store, load, read};

}  // namespace tp
