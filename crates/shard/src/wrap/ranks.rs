//! The ranks that shard a module together.

use burn_fsdp_collectives::{ProcessGroup, ProcessMesh};

use crate::error::Error;
use crate::policy::{ReduceGroup, ShardPolicy};
use crate::spec::Groups;
use burn_fsdp_mesh::Strategy;

/// The groups of ranks over which a call shards a module.
pub(super) struct Ranks {
    /// All ranks that train the module together.
    pub(super) all: ProcessGroup,
    pub(super) groups: Groups,
}

impl Ranks {
    /// Returns the groups that `policy` selects on `mesh`.
    pub(super) fn new(mesh: &ProcessMesh, policy: &ShardPolicy) -> Result<Self, Error> {
        let along = |axis: &str, method| {
            let known = mesh.mesh().axes().iter().map(|axis| axis.name.as_str());
            match mesh.along(axis) {
                Ok(group) => Ok(group.clone()),
                Err(_) => Err(Error::Axis {
                    axis: axis.to_owned(),
                    known: known.collect::<Vec<_>>().join("`, `"),
                    method,
                }),
            }
        };
        let shard = along(&policy.axis, "axis")?;
        if policy.replicate_axis.as_ref() == Some(&policy.axis) {
            return Err(Error::Option {
                option: "replicate_axis",
                expected: "an axis other than the shard axis",
                got: format!("\"{}\"", policy.axis),
            });
        }
        let replicas = match &policy.replicate_axis {
            Some(axis) => Some(along(axis, "replicate_axis")?),
            None => None,
        };
        let all = match &replicas {
            None => shard.clone(),
            Some(replicas) if replicas.size() * shard.size() == mesh.world().size() => {
                mesh.world().clone()
            }
            Some(_) => {
                // Ranks that train together have the same coordinates on all other axes.
                let axes = mesh.mesh().axes().iter().zip(mesh.coordinate());
                let ours = |name: &str| {
                    name == policy.axis || Some(name) == policy.replicate_axis.as_deref()
                };
                let others = axes.filter(|(axis, _)| !ours(&axis.name));
                let color = others.fold(0, |color, (axis, index)| color * axis.size + index);
                let world = mesh.world();
                world.split(color, world.rank(), "replicate and shard")?
            }
        };
        if policy.strategy == Strategy::NoShard {
            // Without shards, one all-reduce covers all ranks.
            return Ok(Self {
                groups: Groups {
                    shard: all.clone(),
                    reduce: all.clone(),
                    replicas: None,
                    neighbours: None,
                },
                all,
            });
        }
        let reduce = match policy.reduce_group {
            ReduceGroup::Shared => shard.clone(),
            ReduceGroup::Own => shard.split(0, shard.rank(), "reductions")?,
        };
        let neighbours = match policy.reshard_to {
            None => None,
            Some(ranks) => neighbours(&shard, ranks)?,
        };
        Ok(Self {
            all,
            groups: Groups {
                shard,
                reduce,
                replicas,
                neighbours,
            },
        })
    }
}

/// Returns the group of this rank and its neighbours, with `ranks` ranks; `None` if that is one rank or all ranks.
fn neighbours(shard: &ProcessGroup, ranks: usize) -> Result<Option<ProcessGroup>, Error> {
    if ranks == 0 || !shard.size().is_multiple_of(ranks) {
        return Err(Error::ReshardTo {
            got: ranks,
            ranks: shard.size(),
        });
    }
    if ranks == 1 || ranks == shard.size() {
        return Ok(None);
    }
    let group = shard.split(shard.rank() / ranks, shard.rank(), "neighbours")?;
    Ok(Some(group))
}
