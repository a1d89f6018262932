//! The policy's setting for the frozen base of adapters.

use super::ShardPolicy;
use crate::base_bits::BaseBits;

impl ShardPolicy {
    /// Holds the frozen matrices that [`lora`](Self::lora) and [`dora`](Self::dora) adapt in 8 or 4 bits, as in QLoRA
    /// (Dettmers et al., arXiv 2305.14314). Default: they keep their type.
    ///
    /// The matrices are quantized once, while sharding. Each rank holds and sends its shards in these bits, and every
    /// rank computes with the unpacked values, in forward and in backward. [`BaseBits::Four`] is the paper's NF4, in
    /// blocks of 64 elements with a 32-bit scale: 4.5 bits per element, 28 percent of bf16. All other parameters keep
    /// their type. Only the adapters are trained, as without this setting.
    ///
    /// Blocks are counted from the first element of the whole matrix, in row-major order, so the values do not depend
    /// on the number of ranks. Shards are therefore cut at multiples of 64 elements; [`Cut::Dims`](crate::Cut::Dims) is
    /// accepted only if rows happen to begin there. The values differ from bitsandbytes', which counts blocks in the
    /// transposed matrix.
    ///
    /// Everything that reads the base gets the unpacked values, rounded to the matrix's own type: records,
    /// checkpoints, summoned and merged parameters, moving averages, visitors, and gather hooks. These values are
    /// exact: quantized again, they do not change. A value that is written to the base (a record, a checkpoint, a
    /// mapper) is quantized.
    ///
    /// A policy without adapters, an infinite or NaN weight, and making the base trainable or casting it are errors.
    ///
    /// ```
    /// use burn::module::Lora;
    /// use burn_fsdp_shard::{BaseBits, ShardPolicy};
    ///
    /// let policy = ShardPolicy::new().units(["blocks.*"]).lora(Lora::new(16, 32.0)).base_in(BaseBits::Four);
    /// # let _ = policy;
    /// ```
    pub fn base_in(mut self, bits: BaseBits) -> Self {
        self.base_bits = Some(bits);
        self
    }
}
