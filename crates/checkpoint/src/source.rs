//! The sources of the bytes to save.

use std::collections::HashMap;
use std::fmt;

use safetensors::Dtype;

use crate::error::BoxError;
use crate::{Region, TensorSpec, WritePlan};

/// The bytes of one part: little-endian elements in row-major order.
pub type PartBytes<'a> = Box<dyn AsRef<[u8]> + Send + Sync + 'a>;

/// Supplies the parts that a rank writes, one at a time and each at most once in a save.
///
/// Any function `FnMut(&TensorSpec, &Region) -> Result<Vec<u8>, BoxError>` is a source.
pub trait Source {
    /// Returns the elements of `region`, without padding. The save drops them as soon as they are written.
    ///
    /// # Errors
    ///
    /// Any error of the source; the save then fails on all ranks, and with [`Error::Source`](crate::Error::Source) on
    /// this one.
    fn part(&mut self, tensor: &TensorSpec, region: &Region) -> Result<PartBytes<'_>, BoxError>;
}

impl<F: FnMut(&TensorSpec, &Region) -> Result<Vec<u8>, BoxError>> Source for F {
    fn part(&mut self, tensor: &TensorSpec, region: &Region) -> Result<PartBytes<'_>, BoxError> {
        Ok(Box::new(self(tensor, region)?))
    }
}

/// The parts of one rank, captured at one moment, by tensor name.
///
/// Stores any owned bytes without copying them: `Vec<u8>`, `Arc<[u8]>`, or a type of the caller. Each part is freed as
/// soon as it is written. Ignores tensors that the plan does not assign to this rank. A plan that assigns other elements
/// of a tensor than this rank holds is an error.
#[derive(Default)]
pub struct Snapshot {
    parts: HashMap<String, Part>,
}

/// A part of a tensor in a snapshot.
struct Part {
    /// The elements that this rank holds.
    region: Region,
    elements: Elements,
}

/// The elements of a part.
enum Elements {
    /// The bytes, in memory.
    Held(PartBytes<'static>),
    /// A function that reads the bytes on demand.
    Read { num_bytes: usize, read: Box<Read> },
}

/// The function that reads a part.
type Read = dyn Fn() -> Result<Vec<u8>, BoxError> + Send + Sync;

impl Elements {
    fn num_bytes(&self) -> usize {
        match self {
            Self::Held(bytes) => (**bytes).as_ref().len(),
            Self::Read { num_bytes, .. } => *num_bytes,
        }
    }

    /// Returns true if all elements are finite. Ignores read errors, which are reported when the part is written.
    fn is_finite(&self, dtype: Dtype) -> bool {
        match self {
            Self::Held(bytes) => is_finite((**bytes).as_ref(), dtype),
            Self::Read { read, .. } => read().map_or(true, |bytes| is_finite(&bytes, dtype)),
        }
    }
}

impl Snapshot {
    /// Creates an empty snapshot.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds this rank's part of a tensor: the elements of `region`.
    pub fn insert(
        &mut self,
        tensor: impl Into<String>,
        region: Region,
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
    ) {
        let elements = Elements::Held(Box::new(bytes));
        self.parts.insert(tensor.into(), Part { region, elements });
    }

    /// Adds this rank's part of a tensor, the elements of `region`, of `num_bytes` bytes, without holding it in memory.
    /// `read` is called when the part is checked or written, and must return the same bytes each time.
    pub fn insert_read(
        &mut self,
        tensor: impl Into<String>,
        region: Region,
        num_bytes: usize,
        read: impl Fn() -> Result<Vec<u8>, BoxError> + Send + Sync + 'static,
    ) {
        let read = Box::new(read);
        let elements = Elements::Read { num_bytes, read };
        self.parts.insert(tensor.into(), Part { region, elements });
    }

    /// Returns the total bytes of all parts.
    pub fn num_bytes(&self) -> usize {
        let parts = self.parts.values();
        parts.map(|part| part.elements.num_bytes()).sum()
    }
}

impl Snapshot {
    /// Returns the name of the first tensor with an infinite or NaN element, among the tensors that the plan assigns to
    /// this rank. It checks only tensors of 64-, 32- and 16-bit floats.
    ///
    /// Every element of a step is written by one rank, so all are finite if no rank finds one that is not.
    pub fn not_finite(&self, plan: &WritePlan, rank: usize) -> Option<String> {
        let tensors = plan
            .of_rank(rank)
            .iter()
            .map(|part| &plan.tensors()[part.tensor]);
        let mut held = tensors.filter_map(|spec| Some((spec, self.parts.get(&spec.name)?)));
        let found = held.find(|(spec, part)| !part.elements.is_finite(spec.dtype));
        found.map(|(spec, _)| spec.name.clone())
    }
}

/// Returns true if all of these little-endian elements are finite: no exponent has all bits set.
fn is_finite(bytes: &[u8], dtype: Dtype) -> bool {
    let halves_below = |exponent: u16| {
        let (halves, _) = bytes.as_chunks::<2>();
        halves
            .iter()
            .all(|half| u16::from_le_bytes(*half) & exponent != exponent)
    };
    match dtype {
        Dtype::F64 => {
            let (elements, _) = bytes.as_chunks::<8>();
            elements
                .iter()
                .all(|element| f64::from_le_bytes(*element).is_finite())
        }
        Dtype::F32 => {
            let (elements, _) = bytes.as_chunks::<4>();
            elements
                .iter()
                .all(|element| f32::from_le_bytes(*element).is_finite())
        }
        Dtype::BF16 => halves_below(0x7f80),
        Dtype::F16 => halves_below(0x7c00),
        _ => true,
    }
}

impl Source for Snapshot {
    fn part(&mut self, tensor: &TensorSpec, region: &Region) -> Result<PartBytes<'_>, BoxError> {
        let Some(part) = self.parts.remove(&tensor.name) else {
            return Err("it is not in the snapshot; insert this rank's part of it".into());
        };
        // Equal sizes do not show that the elements are the right ones.
        let have_elements = !(part.region.is_empty() && region.is_empty());
        if have_elements && part.region != *region {
            return Err(format!(
                "this rank holds {}, but the plan makes it write {region}; plan with the mesh of the ranks that save, \
                 and with the axis over which the tensor is sharded",
                part.region
            )
            .into());
        }
        match part.elements {
            Elements::Held(bytes) => Ok(bytes),
            Elements::Read { read, .. } => Ok(Box::new(read()?)),
        }
    }
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot")
            .field("num_tensors", &self.parts.len())
            .field("num_bytes", &self.num_bytes())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinities_and_nans_are_detected_in_every_float_type() {
        let f32s = |values: [f32; 3]| values.map(f32::to_le_bytes).concat();
        let f64s = |values: [f64; 3]| values.map(f64::to_le_bytes).concat();
        let halves = |values: [u16; 3]| values.map(u16::to_le_bytes).concat();
        for (dtype, good, bad) in [
            (
                Dtype::F32,
                f32s([1.0, f32::MAX, -0.0]),
                f32s([1.0, 0.0, f32::NAN]),
            ),
            (
                Dtype::F32,
                f32s([0.0; 3]),
                f32s([1.0, f32::NEG_INFINITY, 0.0]),
            ),
            (
                Dtype::F64,
                f64s([f64::MIN, 0.0, 1.0]),
                f64s([f64::INFINITY, 0.0, 1.0]),
            ),
            // 1, the largest, the smallest below zero; NaN and infinity.
            (
                Dtype::BF16,
                halves([0x3f80, 0x7f7f, 0x8001]),
                halves([0x3f80, 0x7fc0, 0]),
            ),
            (Dtype::BF16, halves([0; 3]), halves([0, 0, 0xff80])),
            (
                Dtype::F16,
                halves([0x3c00, 0x7bff, 0x8001]),
                halves([0x3c00, 0x7e00, 0]),
            ),
            (Dtype::F16, halves([0; 3]), halves([0, 0, 0xfc00])),
        ] {
            assert!(is_finite(&good, dtype), "{dtype}: {good:?}");
            assert!(!is_finite(&bad, dtype), "{dtype}: {bad:?}");
        }
        assert!(is_finite(&[255; 8], Dtype::I64));
    }
}
