//! A plan of the parts of tensors that each rank writes. All ranks compute the same plan from the same tensors.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use burn_fsdp_mesh::Mesh;

use crate::tensor::check_tensor;
use crate::{Error, Region, TensorSpec};

/// The parts that each rank writes when these tensors are saved.
///
/// Each element is written by exactly one of the ranks that hold it. Parts that several ranks hold are assigned from
/// the largest to the smallest, each to the holder that has the least to write so far.
#[derive(Debug, Clone, PartialEq)]
pub struct WritePlan {
    mesh: Mesh,
    tensors: Vec<TensorSpec>,
    /// The parts that each rank writes, by rank.
    ranks: Vec<Vec<Assignment>>,
}

/// A part that one rank writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// Index of the tensor in [`WritePlan::tensors`].
    pub tensor: usize,
    /// The elements of the tensor to write.
    pub region: Region,
    /// Number of bytes to write.
    pub num_bytes: usize,
}

impl WritePlan {
    /// Plans the save of tensors that are distributed over a mesh by their layouts.
    ///
    /// # Errors
    ///
    /// [`Error::Tensor`] for a name, shape or dtype that cannot be saved, for a duplicate name, and for a layout that
    /// does not fit the mesh or the shape.
    pub fn new(mesh: &Mesh, tensors: Vec<TensorSpec>) -> Result<Self, Error> {
        let regions = |tensor: &TensorSpec| {
            (0..mesh.size())
                .map(|rank| tensor.layout.region(&tensor.shape, mesh, rank))
                .collect::<Result<Vec<_>, _>>()
        };
        let regions = tensors.iter().map(|tensor| {
            regions(tensor).map_err(|error| Error::Tensor {
                tensor: tensor.name.clone(),
                problem: error.to_string(),
            })
        });
        let regions = regions.collect::<Result<Vec<_>, _>>()?;
        Self::of_regions(mesh, tensors, regions)
    }

    /// Plans the save of tensors whose distribution no layout describes: `regions[tensor][rank]` is the region that a
    /// rank holds, or an empty range.
    ///
    /// Any two regions of a tensor must be the same or disjoint. The commit verifies that they tile the tensor.
    ///
    /// # Errors
    ///
    /// [`Error::Tensor`] for a name, shape or dtype that cannot be saved, or for a duplicate name; [`Error::Region`]
    /// for a region that is not in its tensor; [`Error::Argument`] if there is not one region for each tensor and rank.
    pub fn of_regions(
        mesh: &Mesh,
        tensors: Vec<TensorSpec>,
        regions: Vec<Vec<Region>>,
    ) -> Result<Self, Error> {
        let num_ranks = mesh.size();
        if regions.len() != tensors.len() || regions.iter().any(|by| by.len() != num_ranks) {
            return Err(Error::Argument {
                argument: "regions",
                expected: format!(
                    "one list for each of the {} tensors, with {num_ranks} regions each",
                    tensors.len()
                ),
                got: format!("{} lists", regions.len()),
            });
        }
        let mut names = HashSet::new();
        let mut parts = Vec::new();
        for (index, (tensor, by_rank)) in tensors.iter().zip(&regions).enumerate() {
            let invalid = |problem| Error::Tensor {
                tensor: tensor.name.clone(),
                problem,
            };
            if !names.insert(&tensor.name) {
                let problem = "two tensors have this name; save tied tensors once";
                return Err(invalid(problem.to_owned()));
            }
            let item_bytes =
                check_tensor(&tensor.name, &tensor.shape, tensor.dtype).map_err(invalid)?;
            parts.extend(parts_of(index, tensor, by_rank, item_bytes)?);
        }
        Ok(Self {
            ranks: assign(parts, num_ranks, &tensors),
            mesh: mesh.clone(),
            tensors,
        })
    }

    /// Returns the mesh of the ranks that save.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the tensors to save, in the order in which they were passed.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Returns the parts that a rank writes, in their order in its file.
    ///
    /// # Panics
    ///
    /// If the mesh does not have this rank.
    #[track_caller]
    pub fn of_rank(&self, rank: usize) -> &[Assignment] {
        &self.ranks[rank]
    }

    /// Returns the tensor bytes that a rank writes.
    ///
    /// # Panics
    ///
    /// If the mesh does not have this rank.
    #[track_caller]
    pub fn bytes_of_rank(&self, rank: usize) -> u64 {
        let parts = self.of_rank(rank).iter();
        parts.map(|part| part.num_bytes as u64).sum()
    }
}

/// A part and the ranks that hold it, in ascending order.
struct Part {
    assignment: Assignment,
    holders: Vec<usize>,
}

fn parts_of(
    index: usize,
    tensor: &TensorSpec,
    by_rank: &[Region],
    item_bytes: usize,
) -> Result<Vec<Part>, Error> {
    let mut parts: Vec<Part> = Vec::new();
    let mut known = HashMap::new();
    for (rank, region) in by_rank.iter().enumerate() {
        region
            .check(&tensor.shape)
            .map_err(|problem| Error::Region {
                tensor: tensor.name.clone(),
                shape: tensor.shape.clone(),
                region: region.clone(),
                problem,
            })?;
        if region.is_empty() {
            continue;
        }
        let part = *known.entry(region).or_insert_with(|| {
            let assignment = Assignment {
                tensor: index,
                region: region.clone(),
                num_bytes: region.len() * item_bytes,
            };
            let holders = Vec::new();
            parts.push(Part {
                assignment,
                holders,
            });
            parts.len() - 1
        });
        parts[part].holders.push(rank);
    }
    // A tensor without elements must also be stored, because loading would otherwise miss it.
    let is_empty = tensor.shape.contains(&0);
    if is_empty {
        let assignment = Assignment {
            tensor: index,
            region: Region::Flat(0..0),
            num_bytes: 0,
        };
        parts.push(Part {
            assignment,
            holders: (0..by_rank.len()).collect(),
        });
    }
    Ok(parts)
}

fn assign(parts: Vec<Part>, num_ranks: usize, tensors: &[TensorSpec]) -> Vec<Vec<Assignment>> {
    let mut ranks = vec![Vec::new(); num_ranks];
    let mut loads = vec![0u64; num_ranks];
    let (mut shared, owned): (Vec<_>, Vec<_>) =
        parts.into_iter().partition(|part| part.holders.len() > 1);
    shared.sort_by_key(|part| Reverse(part.assignment.num_bytes));
    for Part {
        assignment,
        holders,
    } in owned.into_iter().chain(shared)
    {
        let Some(writer) = holders.into_iter().min_by_key(|rank| loads[*rank]) else {
            continue;
        };
        loads[writer] += assignment.num_bytes as u64;
        ranks[writer].push(assignment);
    }
    for parts in &mut ranks {
        // Widest elements first, which aligns every tensor to its elements.
        parts.sort_by_key(|part| (Reverse(tensors[part.tensor].dtype.bitsize()), part.tensor));
    }
    ranks
}
