#include "avx512_int8.h"

namespace tp {

const Int8 avx512_int8 = {Coded::packed_bytes, Coded::pack, Coded::dots, Coded::products};
const Isa avx512_isa = {"avx512", packed_bytes, pack, dots_of_any, plain_products, activate, gate, norm, add_scaled,
                        store, load, read, attend, delta, nullptr, &avx512_int8};

}  // namespace tp
