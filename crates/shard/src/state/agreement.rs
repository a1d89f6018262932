//! Checks that ranks hold the same values where they must agree.

use std::collections::HashMap;

use burn::module::{Module, Param};
use burn::tensor::{Bool, Int, Tensor, TensorData};

use burn_fsdp_collectives::Fingerprint;
use burn_fsdp_tensors as tensors;

use crate::error::Error;
use crate::inspect::{self, Member};
use crate::path::{self, Location};
use crate::survey::survey;

/// The tensors that [`check_agreement`] compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Agreement {
    /// All tensors except running states.
    #[default]
    Parameters,
    /// All tensors. Running states differ after training on different batches, until
    /// [`sync_buffers`](crate::sync_buffers).
    ParametersAndBuffers,
}

/// Checks by checksum that all ranks hold the same bits of all tensors that should be equal: parameters kept whole,
/// replicas of shards, and parameters that no unit manages.
///
/// Use it at the start of a run, because ranks with different initial values silently train different models, and
/// whenever a difference is suspected. [`fully_shard`](crate::fully_shard) gives all ranks rank 0's values of the
/// parameters that it shards. Each rank sets its other tensors itself.
///
/// Collective over all ranks of the module, between steps: one exchange, with 16 bytes for each tensor.
///
/// # Errors
///
/// [`Error::Disagreement`] on all ranks, with the first tensor that differs and two ranks that differ;
/// [`Error::NotSharded`]; a failed collective.
pub fn check_agreement<M: Module>(module: &M, of: Agreement) -> Result<(), Error> {
    let group = inspect::root_of(module)?.group.clone();
    let mut sums = Checksums {
        members: inspect::fields(module).into_iter().collect(),
        left_out: match of {
            Agreement::Parameters => survey(module)?.buffers,
            Agreement::ParametersAndBuffers => {
                // Running states show their last update only after `valid`.
                drop(module.valid());
                Vec::new()
            }
        },
        found: Vec::new(),
    };
    inspect::visit(module, &mut sums);
    let own: Vec<u8> = sums
        .found
        .iter()
        .flat_map(|(_, sum)| sum.to_bytes())
        .collect();
    let all = group.exchange("agreement on initial values", own)?;
    let all: Vec<Vec<Checksum>> = all.iter().map(|bytes| Checksum::read(bytes)).collect();
    for (index, (path, _)) in sums.found.iter().enumerate() {
        if let Some((rank, peer)) = difference(&all, index) {
            return Err(Error::Disagreement {
                rank,
                peer,
                path: path.clone(),
            });
        }
    }
    Ok(())
}

/// Returns the first two ranks with different values of the same part of parameter `index`.
fn difference(all: &[Vec<Checksum>], index: usize) -> Option<(usize, usize)> {
    let mut first: HashMap<u64, (usize, u64)> = HashMap::new();
    for (rank, sums) in all.iter().enumerate() {
        let Some(sum) = sums.get(index) else {
            // This rank has fewer parameters than another one.
            return Some((0, rank));
        };
        let (holder, hash) = *first.entry(sum.piece).or_insert((rank, sum.hash));
        if hash != sum.hash {
            return Some((holder, rank));
        }
    }
    None
}

/// A checksum of a rank's part of one parameter.
#[derive(Debug, Clone, Copy)]
struct Checksum {
    /// The number of the part; ranks with the same number are replicas of each other.
    piece: u64,
    hash: u64,
}

impl Checksum {
    fn of(piece: usize, flat: Tensor<1>) -> Self {
        let size = flat.dtype().size();
        Self::of_bytes(piece, size, tensors::source(flat, None).as_bytes())
    }

    fn of_data(data: &TensorData) -> Self {
        Self::of_bytes(0, data.dtype().size(), data.as_bytes())
    }

    fn of_bytes(piece: usize, size: usize, bytes: &[u8]) -> Self {
        Self {
            piece: piece as u64,
            hash: Fingerprint::of(&(size, bytes)),
        }
    }

    fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.piece.to_le_bytes());
        bytes[8..].copy_from_slice(&self.hash.to_le_bytes());
        bytes
    }

    fn read(bytes: &[u8]) -> Vec<Self> {
        let (words, _) = bytes.as_chunks::<8>();
        let (pairs, _) = words.as_chunks::<2>();
        let read = |[piece, hash]: &[[u8; 8]; 2]| Self {
            piece: u64::from_le_bytes(*piece),
            hash: u64::from_le_bytes(*hash),
        };
        pairs.iter().map(read).collect()
    }
}

struct Checksums {
    members: HashMap<String, Member>,
    left_out: Vec<String>,
    found: Vec<(String, Checksum)>,
}

impl path::Visitor for Checksums {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        let path = place.path();
        if self.left_out.contains(&path) {
            return;
        }
        let sum = match self.members.remove(&path) {
            Some(member) if member.is_tied => return,
            Some(member) => {
                let piece = if member.slot().is_gathered() {
                    member.generation.unit.groups.shard.rank()
                } else {
                    0
                };
                Checksum::of(piece, member.generation.value(member.index).inner())
            }
            None => {
                let value = param.val().inner();
                let len = value.shape().num_elements();
                Checksum::of(0, value.reshape([len]))
            }
        };
        self.found.push((path, sum));
    }

    fn int<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D, Int>>) {
        let sum = Checksum::of_data(&param.val().into_data());
        self.found.push((place.path(), sum));
    }

    fn bool<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D, Bool>>) {
        let sum = Checksum::of_data(&param.val().into_data());
        self.found.push((place.path(), sum));
    }
}
