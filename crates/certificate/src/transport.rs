//! Collectives on exact tensors, for all ranks at once.

use burn_fsdp_mesh::ReduceOp;

use super::field::{Element, add, inverse, mul, of_integer};
use super::tensor::Kind;
use burn_fsdp_spmd::graph::{Collective, CollectiveKind, CollectivePart};

/// Returns each rank's flat result of one part of a collective, from the values of all ranks of the group.
pub(super) fn exchanged(
    collective: &Collective,
    part: &CollectivePart,
    given: &[&[Element]],
) -> Result<Vec<Vec<Element>>, String> {
    let num_ranks = given.len();
    let partition = &part.partition;
    if collective.kind != CollectiveKind::AllReduce && partition.num_shards() != num_ranks {
        return Err(format!(
            "{} is cut for {} ranks instead of {num_ranks}",
            part.path,
            partition.num_shards()
        ));
    }
    match collective.kind {
        CollectiveKind::AllGather => {
            let mut whole = Vec::with_capacity(partition.num_elements());
            for (rank, own) in given.iter().enumerate() {
                whole.extend_from_slice(head(own, partition.len(rank))?);
            }
            Ok(vec![whole; num_ranks])
        }
        CollectiveKind::ReduceScatter => {
            let whole = combined(collective, given)?;
            let parts = (0..num_ranks).map(|rank| {
                let range = partition.range(rank);
                let own = whole.get(range);
                let own = own.filter(|_| whole.len() == partition.num_elements());
                let own = own.ok_or("its tensor has a different length from its partition")?;
                let mut own = own.to_vec();
                if partition.sole_owner().is_none() {
                    own.resize(partition.chunk_len(), 0);
                }
                Ok(own)
            });
            parts.collect()
        }
        CollectiveKind::AllReduce => Ok(vec![combined(collective, given)?; num_ranks]),
        CollectiveKind::AllToAll => {
            let across = part.across.as_ref().ok_or("it is cut along only one dim")?;
            let block = |from: usize, to: usize| {
                let before: usize = (0..to).map(|rank| across.len(rank)).sum();
                let rows = partition.len(from);
                let (start, len) = (rows * before, rows * across.len(to));
                let block = given[from].get(start..start + len);
                block.ok_or_else(|| "its tensor is too short".to_owned())
            };
            let gets = (0..num_ranks).map(|to| {
                let blocks = (0..num_ranks).map(|from| block(from, to));
                let blocks = blocks.collect::<Result<Vec<_>, _>>()?;
                Ok(blocks.concat())
            });
            gets.collect()
        }
    }
}

fn head(own: &[Element], len: usize) -> Result<&[Element], String> {
    own.get(..len)
        .ok_or_else(|| format!("a rank contributes {} elements instead of {len}", own.len()))
}

/// Reduces the values of all ranks of the group.
fn combined(collective: &Collective, given: &[&[Element]]) -> Result<Vec<Element>, String> {
    let len = given.first().map_or(0, |first| first.len());
    if given.iter().any(|other| other.len() != len) {
        return Err("ranks contribute tensors of different lengths".to_owned());
    }
    let share = inverse(of_integer(given.len() as i64));
    let order = |element: &Element| Kind::Float.order(*element);
    let combine = |at: usize| {
        let all = given.iter().map(|own| own[at]);
        match collective.reduction {
            Some(ReduceOp::Sum) | None => all.fold(0, add),
            Some(ReduceOp::Mean) => mul(all.fold(0, add), share),
            Some(ReduceOp::Max) => all.max_by_key(order).unwrap_or(0),
            Some(ReduceOp::Min) => all.min_by_key(order).unwrap_or(0),
        }
    };
    Ok((0..len).map(combine).collect())
}
