//! The forms of shards in fewer bits: the 8-bit form in which shards are sent, and a frozen base's, in which they are
//! also held.

use burn::tensor::{DType, TensorData};
use burn_fsdp_mesh::{Error, Partition};

use crate::base_bits::Quantized;

/// The shards of one parameter in fewer bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packed {
    /// Only gathers have this form.
    Sent(Packing),
    /// Shards are held and sent in this form.
    Held(Quantized),
}

impl Packed {
    /// Returns the partition of all records' bytes into one record per rank.
    pub(crate) fn bytes(&self) -> Partition {
        match self {
            Self::Sent(packing) => packing.bytes,
            Self::Held(quantized) => quantized.bytes,
        }
    }

    /// Returns the number of bytes in all records.
    pub(crate) fn len(&self) -> usize {
        self.bytes().num_elements()
    }

    /// Unpacks all records, and writes the elements to `into` in the type `dtype`.
    pub(crate) fn unpack(&self, records: &[u8], dtype: DType, into: &mut [u8]) {
        match self {
            Self::Held(quantized) => quantized.unpack(records, dtype, into),
            Self::Sent(packing) if dtype == DType::F32 => packing.unpack(records, into),
            Self::Sent(packing) => {
                let len = packing.elements.num_elements();
                let mut wide = vec![0; len * DType::F32.size()];
                packing.unpack(records, &mut wide);
                let wide = TensorData::from_bytes_vec(wide, [len], DType::F32);
                into.copy_from_slice(wide.convert_dtype(dtype).as_bytes());
            }
        }
    }
}

/// Number of elements that share a scale, counted from a shard's first element.
pub(crate) const BLOCK: usize = 256;

/// The shards of one parameter in 8 bits, in the form sent to all ranks. Each shard has a record, and all records have
/// equal length: an 8-bit code for each element of the largest shard, followed by a 32-bit scale for each block of
/// [`BLOCK`] elements.
///
/// An element is its code, from -127 to 127, times the scale, which is a 127th of the block's largest magnitude. The
/// rank that owns the shard also computes with the rounded values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Packing {
    elements: Partition,
    /// The partition of all records' bytes into one record per rank.
    pub(crate) bytes: Partition,
}

impl Packing {
    /// Returns the packing of a parameter with this partition.
    ///
    /// # Errors
    ///
    /// Fails if the number of bytes overflows.
    pub(crate) fn new(elements: Partition) -> Result<Self, Error> {
        let num_shards = elements.num_shards();
        let len = record_len(elements.chunk_len());
        let bytes = match elements.sole_owner() {
            Some(owner) => Partition::one_owner(len, num_shards, owner)?,
            None => Partition::rows(&[num_shards, len], num_shards)?,
        };
        Ok(Self { elements, bytes })
    }

    /// Returns the record of shard `shard`, whose elements are 32-bit floats in native byte order. It is empty for a
    /// rank that has no record.
    pub(crate) fn packed(&self, elements: &[u8], shard: usize) -> Vec<u8> {
        let mut record = vec![0; self.bytes.len(shard)];
        if record.is_empty() {
            return record;
        }
        let (codes, scales) = record.split_at_mut(self.elements.chunk_len());
        let (scales, _) = scales.as_chunks_mut::<4>();
        let (words, _) = elements.as_chunks::<4>();
        let blocks = words.chunks(BLOCK).zip(codes.chunks_mut(BLOCK));
        for ((words, codes), scale) in blocks.zip(scales) {
            *scale = encode(words, codes).to_ne_bytes();
        }
        record
    }

    /// Unpacks all records, and writes the elements to `into` as 32-bit floats in native byte order.
    pub(crate) fn unpack(&self, records: &[u8], into: &mut [u8]) {
        for (shard, range) in self.elements.non_empty() {
            let record = &records[self.bytes.range(shard)];
            let (codes, scales) = record.split_at(self.elements.chunk_len());
            let (scales, _) = scales.as_chunks::<4>();
            let (words, _) = into.as_chunks_mut::<4>();
            let words = words[range].chunks_mut(BLOCK);
            for ((words, codes), scale) in words.zip(codes.chunks(BLOCK)).zip(scales) {
                let scale = f32::from_ne_bytes(*scale);
                for (word, code) in words.iter_mut().zip(codes) {
                    *word = (f32::from(*code as i8) * scale).to_ne_bytes();
                }
            }
        }
    }
}

/// Returns the number of bytes in the record of a shard with this many elements.
fn record_len(elements: usize) -> usize {
    elements + size_of::<f32>() * elements.div_ceil(BLOCK)
}

/// Writes the codes of a block to `codes`. Returns its scale. If an element is infinite or NaN, the scale and thus the
/// whole block is NaN.
fn encode(words: &[[u8; 4]], codes: &mut [u8]) -> f32 {
    let value = |word: &[u8; 4]| f32::from_ne_bytes(*word);
    let is_finite = words.iter().all(|word| value(word).is_finite());
    let sizes = words.iter().map(|word| value(word).abs());
    let largest = sizes.fold(0.0, f32::max);
    let scale = if is_finite { largest / 127.0 } else { f32::NAN };
    for (word, code) in words.iter().zip(codes) {
        // A block of zeros divides 0 by 0, and the NaN is cast to 0.
        let steps = (value(word) / scale).round_ties_even();
        *code = steps.clamp(-127.0, 127.0) as i8 as u8;
    }
    scale
}

#[cfg(test)]
mod tests {
    use burn_fsdp_mesh::Partition;

    use super::{BLOCK, Packing};

    fn bytes(values: &[f32]) -> Vec<u8> {
        values
            .iter()
            .flat_map(|value| value.to_ne_bytes())
            .collect()
    }

    /// Returns `values` as all ranks receive them in a gather.
    fn arrived(values: &[f32], partition: Partition) -> Vec<f32> {
        let packing = Packing::new(partition).expect("few");
        let records: Vec<u8> = (partition.ranges().enumerate())
            .flat_map(|(shard, range)| packing.packed(&bytes(&values[range]), shard))
            .collect();
        assert_eq!(records.len(), packing.bytes.num_elements());
        let mut into = vec![0xff; 4 * values.len()];
        packing.unpack(&records, &mut into);
        let (words, _) = into.as_chunks::<4>();
        words.iter().map(|word| f32::from_ne_bytes(*word)).collect()
    }

    fn partitions(len: usize) -> Vec<Partition> {
        let flat = (1..=4).map(|shards| Partition::flat(len, shards));
        let multiples = (2..=4).map(|shards| Partition::multiples(len, BLOCK, shards));
        let owned = (0..3).map(|owner| Partition::one_owner(len, 3, owner));
        let all = flat.chain(multiples).chain(owned);
        all.map(|partition| partition.expect("few")).collect()
    }

    #[test]
    fn an_element_is_within_half_a_step_of_its_block() {
        for len in [1, 3, 255, 256, 257, 1000, 2048] {
            let values: Vec<f32> = (0..len)
                .map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0)
                .map(|value| value * 10f32.powi(len as i32 % 7 - 3))
                .collect();
            for partition in partitions(len) {
                let got = arrived(&values, partition);
                for range in partition.ranges() {
                    for start in range.clone().step_by(BLOCK) {
                        let block = start..(start + BLOCK).min(range.end);
                        let sizes = values[block.clone()].iter().map(|value| value.abs());
                        let bound = sizes.fold(0.0, f32::max) / 254.0;
                        for i in block {
                            let error = (got[i] - values[i]).abs();
                            assert!(
                                error <= bound * 1.0001,
                                "{partition}: {i}: {error}, {bound}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn non_finite_values_turn_their_block_to_nan() {
        let mut values = vec![1.0; 600];
        values[300] = f32::INFINITY;
        let got = arrived(&values, Partition::flat(600, 1).expect("few"));
        assert!(got[256..512].iter().all(|value| value.is_nan()));
        assert!(
            got[..256]
                .iter()
                .chain(&got[512..])
                .all(|value| *value == 1.0)
        );
        let zeros = arrived(&[0.0; 5], Partition::flat(5, 2).expect("few"));
        assert_eq!(zeros, [0.0; 5]);
    }
}
