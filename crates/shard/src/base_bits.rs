//! The frozen base of adapters in 8 or 4 bits.
//!
//! The 4-bit form is NormalFloat (NF4) of Dettmers et al., "QLoRA" (arXiv 2305.14314): 16 levels, which are quantiles of
//! a normal distribution (section 3, equation 4; the numbers are in appendix E), and blocks with one scale each
//! (section 2, equation 1). The 8-bit form is the same paper's equation 1.

use burn::tensor::{DType, bf16, f16};
use burn_fsdp_mesh::{Error, Partition};

/// Bits per element of a frozen base, for [`ShardPolicy::base_in`](crate::ShardPolicy::base_in).
///
/// The elements of a matrix, in row-major order, form blocks of [`BLOCK`](Self::BLOCK). Each block has a 32-bit scale,
/// its largest magnitude. An element is a level, from -1 to 1, times the scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BaseBits {
    /// 255 levels, the multiples of 1 / 127: 8.5 bits with the scale.
    Eight,
    /// The 16 levels of NF4: 4.5 bits with the scale.
    Four,
}

/// The levels of NF4 (Dettmers et al., "QLoRA", appendix E).
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The points halfway between two levels of NF4.
const MIDDLES: [f64; 15] = {
    let mut middles = [0.0; 15];
    let mut code = 0;
    while code < middles.len() {
        middles[code] = (NF4[code] as f64 + NF4[code + 1] as f64) / 2.0;
        code += 1;
    }
    middles
};

impl BaseBits {
    /// Number of elements that share a scale, counted from the first element of the whole matrix.
    pub const BLOCK: usize = 64;

    /// Returns the values that a base of these elements, from the first of a block on, has in these bits. The result is
    /// in 32 bits; a 16-bit base is rounded to its type afterwards.
    ///
    /// A block with an infinite or NaN element is NaN.
    pub fn rounded(self, values: &[f32]) -> Vec<f32> {
        let mut rounded = Vec::with_capacity(values.len());
        let mut codes = [0; Self::BLOCK];
        for block in values.chunks(Self::BLOCK) {
            let scale = self.encode(block, &mut codes);
            let levels = codes[..block.len()].iter().map(|code| self.level(*code));
            rounded.extend(levels.map(|level| value(level, scale)));
        }
        rounded
    }

    /// Returns the number of bytes for the codes of this many elements. The scales after them are aligned.
    fn code_bytes(self, num_elements: usize) -> usize {
        let bytes = match self {
            Self::Eight => num_elements,
            Self::Four => num_elements.div_ceil(2),
        };
        bytes.next_multiple_of(size_of::<f32>())
    }

    fn level(self, code: u8) -> f32 {
        match self {
            Self::Eight => f32::from(code as i8) / 127.0,
            Self::Four => NF4[usize::from(code)],
        }
    }

    /// Writes the code of each element of a block, and returns the block's scale.
    fn encode(self, block: &[f32], codes: &mut [u8]) -> f32 {
        let is_finite = block.iter().all(|value| value.is_finite());
        let largest = block.iter().map(|value| value.abs()).fold(0.0, f32::max);
        for (value, code) in block.iter().zip(codes) {
            // A block of zeros divides 0 by 0.
            let level = if is_finite && largest > 0.0 {
                value / largest
            } else {
                0.0
            };
            *code = self.nearest(level);
        }
        if is_finite { largest } else { f32::NAN }
    }

    /// Returns the code of the level nearest to `level`, which is from -1 to 1. Of two, it is the lower one in 4 bits.
    fn nearest(self, level: f32) -> u8 {
        match self {
            Self::Eight => (level * 127.0).round_ties_even() as i8 as u8,
            Self::Four => MIDDLES.partition_point(|middle| *middle < f64::from(level)) as u8,
        }
    }
}

/// Returns a level times a scale. A negative level of a tiny scale is 0, not -0, which has no code.
fn value(level: f32, scale: f32) -> f32 {
    level * scale + 0.0
}

/// The shards of one frozen matrix in 8 or 4 bits, in the form in which ranks hold and send them. Each shard has a
/// record, and all records have equal length: the codes, two in a byte if they have 4 bits (the first one in the low
/// half), followed by the scales.
///
/// Every shard begins with a block of the whole matrix, so the values do not depend on the number of shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Quantized {
    bits: BaseBits,
    /// The type in which the model stores the matrix. Unpacked values are rounded to it before anything else.
    stored: DType,
    elements: Partition,
    /// The partition of all records' bytes into one record per rank.
    pub(crate) bytes: Partition,
}

impl Quantized {
    /// Returns the form of a matrix with this partition, which begins each shard with a block.
    ///
    /// # Errors
    ///
    /// Fails if the number of bytes overflows.
    pub(crate) fn new(bits: BaseBits, stored: DType, elements: Partition) -> Result<Self, Error> {
        let chunk = elements.chunk_len();
        let scales = size_of::<f32>() * chunk.div_ceil(BaseBits::BLOCK);
        let (len, num_shards) = (bits.code_bytes(chunk) + scales, elements.num_shards());
        let bytes = match elements.sole_owner() {
            Some(owner) => Partition::one_owner(len, num_shards, owner)?,
            None => Partition::rows(&[num_shards, len], num_shards)?,
        };
        Ok(Self {
            bits,
            stored,
            elements,
            bytes,
        })
    }

    /// Returns the record of shard `shard`, whose elements are 32-bit floats in native byte order, and the number of the
    /// shard's first element that is infinite or NaN, if any. The record is empty for a rank that has none.
    pub(crate) fn record(&self, elements: &[u8], shard: usize) -> (Vec<u8>, Option<usize>) {
        let mut record = vec![0; self.bytes.len(shard)];
        if record.is_empty() {
            return (record, None);
        }
        let (codes, scales) = record.split_at_mut(self.code_bytes());
        let (scales, _) = scales.as_chunks_mut::<4>();
        let (words, _) = elements.as_chunks::<4>();
        let value = |word: &[u8; 4]| f32::from_ne_bytes(*word);
        let mut block = [0.0; BaseBits::BLOCK];
        let mut own = [0; BaseBits::BLOCK];
        let into = codes.chunks_mut(self.bits.code_bytes(BaseBits::BLOCK));
        for ((words, codes), scale) in words.chunks(BaseBits::BLOCK).zip(into).zip(scales) {
            for (to, word) in block.iter_mut().zip(words) {
                *to = value(word);
            }
            let own = &mut own[..words.len()];
            *scale = (self.bits.encode(&block[..words.len()], own)).to_ne_bytes();
            match self.bits {
                BaseBits::Eight => codes[..own.len()].copy_from_slice(own),
                BaseBits::Four => {
                    for (byte, pair) in codes.iter_mut().zip(own.chunks(2)) {
                        *byte = pair[0] | pair.get(1).unwrap_or(&0) << 4;
                    }
                }
            }
        }
        let not_finite = words.iter().position(|word| !value(word).is_finite());
        (record, not_finite)
    }

    /// Unpacks all records, and writes the elements to `into` in the type `dtype`.
    pub(crate) fn unpack(&self, records: &[u8], dtype: DType, into: &mut [u8]) {
        for (shard, range) in self.elements.non_empty() {
            let record = &records[self.bytes.range(shard)];
            let bytes = range.start * dtype.size()..range.end * dtype.size();
            self.unpack_record(record, dtype, &mut into[bytes]);
        }
    }

    /// Returns the elements of one shard in the stored type.
    pub(crate) fn elements(&self, record: &[u8], shard: usize) -> Vec<u8> {
        let mut elements = vec![0; self.elements.len(shard) * self.stored.size()];
        self.unpack_record(record, self.stored, &mut elements);
        elements
    }

    fn unpack_record(&self, record: &[u8], dtype: DType, into: &mut [u8]) {
        if into.is_empty() {
            return;
        }
        let (codes, scales) = record.split_at(self.code_bytes());
        let (scales, _) = scales.as_chunks::<4>();
        let mut block = [0.0; BaseBits::BLOCK];
        let codes = codes.chunks(self.bits.code_bytes(BaseBits::BLOCK));
        let into = into.chunks_mut(BaseBits::BLOCK * dtype.size());
        for ((codes, scale), into) in codes.zip(scales).zip(into) {
            let scale = f32::from_ne_bytes(*scale);
            self.unpack_block(codes, scale, &mut block);
            round_to(&mut block, self.stored);
            write_as(&block, dtype, into);
        }
    }

    fn unpack_block(&self, codes: &[u8], scale: f32, block: &mut [f32; BaseBits::BLOCK]) {
        match self.bits {
            BaseBits::Eight => {
                for (to, code) in block.iter_mut().zip(codes) {
                    *to = value(self.bits.level(*code), scale);
                }
            }
            BaseBits::Four => {
                let levels = NF4.map(|level| value(level, scale));
                let (pairs, _) = block.as_chunks_mut::<2>();
                for (pair, byte) in pairs.iter_mut().zip(codes) {
                    *pair = [byte & 0xf, byte >> 4].map(|code| levels[usize::from(code)]);
                }
            }
        }
    }

    fn code_bytes(&self) -> usize {
        self.bits.code_bytes(self.elements.chunk_len())
    }
}

/// Rounds values to a stored type.
fn round_to(values: &mut [f32], stored: DType) {
    let round: fn(f32) -> f32 = match stored {
        DType::BF16 => |value| bf16::from_f32(value).to_f32(),
        DType::F16 => |value| f16::from_f32(value).to_f32(),
        _ => return,
    };
    for value in values {
        // -0 has no code.
        *value = round(*value) + 0.0;
    }
}

/// Writes as many values as `into` has room for, in a float type of 32 or 16 bits.
fn write_as(values: &[f32], dtype: DType, into: &mut [u8]) {
    match dtype {
        DType::BF16 => write(values, into, |value| bf16::from_f32(value).to_ne_bytes()),
        DType::F16 => write(values, into, |value| f16::from_f32(value).to_ne_bytes()),
        _ => write(values, into, f32::to_ne_bytes),
    }
}

fn write<const N: usize>(values: &[f32], into: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
    let (elements, _) = into.as_chunks_mut::<N>();
    for (element, value) in elements.iter_mut().zip(values) {
        *element = bytes(*value);
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, bf16, f16};
    use burn_fsdp_mesh::Partition;

    use super::{BaseBits, NF4, Quantized, round_to};

    const BOTH: [BaseBits; 2] = [BaseBits::Eight, BaseBits::Four];

    fn bytes(values: &[f32]) -> Vec<u8> {
        let bytes = values.iter().flat_map(|value| value.to_ne_bytes());
        bytes.collect()
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        let (words, _) = bytes.as_chunks::<4>();
        words.iter().map(|word| f32::from_ne_bytes(*word)).collect()
    }

    /// Returns `values` as all ranks receive them in a gather.
    fn arrived(bits: BaseBits, values: &[f32], partition: Partition) -> Vec<f32> {
        let form = Quantized::new(bits, DType::F32, partition).expect("few");
        let records: Vec<u8> = (partition.ranges().enumerate())
            .flat_map(|(shard, range)| {
                let (record, _) = form.record(&bytes(&values[range.clone()]), shard);
                let own = floats(&form.elements(&record, shard));
                assert_eq!(own, bits.rounded(&values[range]), "{partition}");
                record
            })
            .collect();
        assert_eq!(records.len(), form.bytes.num_elements());
        let mut into = vec![0xff; 4 * values.len()];
        form.unpack(&records, DType::F32, &mut into);
        floats(&into)
    }

    #[test]
    fn values_do_not_depend_on_the_partition() {
        for len in [1, 2, 3, 63, 64, 65, 127, 128, 200, 1000] {
            let values: Vec<f32> = (0..len)
                .map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0)
                .map(|value| value * 10_f32.powi(len % 7 - 3))
                .collect();
            let len = values.len();
            let cut = (1..=5).map(|shards| Partition::multiples(len, BaseBits::BLOCK, shards));
            let owned = (0..3).map(|owner| Partition::one_owner(len, 3, owner));
            let rows = [
                Partition::rows(&[5, 64], 3),
                Partition::rows(&[4, 128], 4),
                Partition::rows(&[4, 128], 3),
            ];
            for bits in BOTH {
                let want = bits.rounded(&values);
                for partition in cut.clone().chain(owned.clone()) {
                    let partition = partition.expect("few");
                    assert_eq!(arrived(bits, &values, partition), want, "{partition}");
                }
                for partition in rows.clone() {
                    let partition = partition.expect("few");
                    let values: Vec<_> = values.iter().copied().cycle().collect_to(&partition);
                    let got = arrived(bits, &values, partition);
                    assert_eq!(got, bits.rounded(&values), "{partition}");
                }
            }
        }
    }

    /// Collects as many values as a partition has elements.
    trait CollectTo: Iterator<Item = f32> + Sized {
        fn collect_to(self, partition: &Partition) -> Vec<f32> {
            self.take(partition.num_elements()).collect()
        }
    }

    impl<I: Iterator<Item = f32>> CollectTo for I {}

    /// Returns the values of a block with this scale, one for each level, in the type `stored`.
    fn levels(bits: BaseBits, scale: f32, stored: DType) -> Vec<f32> {
        let levels: Vec<f32> = match bits {
            BaseBits::Eight => (-127..=127_i8).map(|code| bits.level(code as u8)).collect(),
            BaseBits::Four => NF4.to_vec(),
        };
        let mut values: Vec<_> = levels
            .iter()
            .map(|level| super::value(*level, scale))
            .collect();
        round_to(&mut values, stored);
        values
    }

    /// A second rounding changes no bit, so a saved base is read back exactly. Blocks have the scale itself and some of
    /// the levels, and there is a block for each level.
    fn assert_stable(bits: BaseBits, scale: f32, stored: DType) {
        let values = levels(bits, scale, stored);
        for some in values.chunks(BaseBits::BLOCK - 1) {
            let mut block = vec![scale];
            block.extend(some);
            let mut again = bits.rounded(&block);
            round_to(&mut again, stored);
            assert!(
                again
                    .iter()
                    .zip(&block)
                    .all(|(again, value)| again.to_bits() == value.to_bits()),
                "{bits:?}, {stored:?}, {scale:e}: {block:?} becomes {again:?}"
            );
        }
    }

    /// All scales of 16 bits, and those of 32 bits whose products are rounded the most: the first multiples of the
    /// smallest number, and a sample of the others.
    #[test]
    fn rounding_again_changes_nothing() {
        for bits in BOTH {
            for scale in 0..1 << 15 {
                for (scale, stored) in [
                    (bf16::from_bits(scale).to_f32(), DType::BF16),
                    (f16::from_bits(scale).to_f32(), DType::F16),
                ] {
                    if scale.is_finite() {
                        assert_stable(bits, scale, stored);
                    }
                }
            }
            for scale in 0..4096 {
                assert_stable(bits, f32::from_bits(scale), DType::F32);
            }
            for scale in (4096..f32::INFINITY.to_bits()).step_by(65_519) {
                assert_stable(bits, f32::from_bits(scale), DType::F32);
            }
        }
    }

    #[test]
    fn the_error_is_at_most_half_of_the_gap_between_levels() {
        let values: Vec<f32> = (0..640)
            .map(|i| ((i * 193) % 641) as f32 / 100.0 - 3.0)
            .collect();
        for (bits, bound) in [(BaseBits::Eight, 0.5 / 127.0), (BaseBits::Four, 0.152)] {
            for (block, got) in values.chunks(64).zip(bits.rounded(&values).chunks(64)) {
                let largest = block.iter().map(|value| value.abs()).fold(0.0, f32::max);
                for (value, got) in block.iter().zip(got) {
                    assert!((value - got).abs() <= bound * largest * 1.0001, "{bits:?}");
                }
            }
        }
    }

    #[test]
    fn zeros_stay_zero_and_non_finite_blocks_are_found() {
        for bits in BOTH {
            let mut values = vec![0.0; 200];
            values[130] = f32::NEG_INFINITY;
            let form = Quantized::new(bits, DType::F32, Partition::flat(200, 1).expect("few"));
            let form = form.expect("few");
            let (record, not_finite) = form.record(&bytes(&values), 0);
            assert_eq!(not_finite, Some(130));
            let got = floats(&form.elements(&record, 0));
            assert!(got[128..192].iter().all(|value| value.is_nan()));
            let rest = got[..128].iter().chain(&got[192..]);
            assert!(rest.into_iter().all(|value| value.to_bits() == 0));
        }
    }

    #[test]
    fn elements_take_half_a_byte_and_a_sixteenth() {
        let partition = Partition::multiples(4096, BaseBits::BLOCK, 4).expect("few");
        let form = Quantized::new(BaseBits::Four, DType::BF16, partition).expect("few");
        assert_eq!(form.bytes.len(0), 1024 / 2 + 1024 / 16);
        let form = Quantized::new(BaseBits::Eight, DType::BF16, partition).expect("few");
        assert_eq!(form.bytes.len(3), 1024 + 1024 / 16);
    }
}
