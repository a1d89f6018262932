//! The division of batch and parameters among the ranks of a compiled step.

use std::sync::Arc;

use burn_fsdp_mesh::{Axis, Cut, Layout, Mesh, Strategy};

use super::owners::Owners;
use crate::error::Error;
use crate::passes::schedule::{self, Options};
use crate::passes::{InsertCollectives, Pipeline, Replicate};
use crate::place::{DataParallel, Expand, ExpandPlacements};
use crate::ranks::{DATA_AXIS, Ranks};
use crate::trace::ParameterSpec;
use crate::transform::GraphTransform;

/// The division of batch and parameters among the ranks.
#[derive(Debug, Clone)]
pub(super) enum Division {
    /// The batch is divided: each rank runs the step on its part.
    DataParallel(DataParallel),
    /// Hybrid sharding: the batch is divided among all ranks, and the parameters along the axis of the shards.
    Hybrid {
        strategy: Strategy,
        shard: Axis,
        replicate: Replicate,
    },
    /// Every value is divided according to its placements on a mesh.
    Expand(Mesh, Expand),
    /// Every value is divided on one axis, by placements that move few bytes; `None` until the first graph.
    Least(Option<Expand>),
}

impl Division {
    /// Returns true if values are divided by placements; the step then computes on the joined batch.
    pub(super) fn is_placed(&self) -> bool {
        match self {
            Self::DataParallel(_) | Self::Hybrid { .. } => false,
            Self::Expand(..) | Self::Least(_) => true,
        }
    }

    /// Returns the axis along which data parallelism shards parameters; `None` for placements, and without shards.
    pub(super) fn shard_axis(&self, mesh: &Mesh) -> Option<Axis> {
        match self {
            Self::DataParallel(style) if style.is_sharded() => mesh.axes().first().cloned(),
            Self::Hybrid { shard, .. } => Some(shard.clone()),
            _ => None,
        }
    }

    /// Returns the layout of a parameter or buffer before there is a graph.
    pub(super) fn initial_layout(
        &self,
        mesh: &Mesh,
        spec: &ParameterSpec,
        (owners, cut): (&Owners, Cut),
    ) -> Result<Layout, Error> {
        let flat = |axis: &str| {
            let layout = Layout::flat(mesh, axis)?;
            Ok(Layout { cut, ..layout })
        };
        if let (Some(axis), Some(owner)) = (self.shard_axis(mesh), owners.of(&spec.path)) {
            return Ok(Layout::owned(mesh, &axis.name, owner)?);
        }
        match self {
            Self::DataParallel(style) if style.is_sharded() && !spec.is_buffer => flat(DATA_AXIS),
            // All values are sharded until the first graph decides which are kept whole.
            Self::Least(None) if !spec.is_buffer => Ok(Layout::flat(mesh, DATA_AXIS)?),
            Self::Hybrid { shard, .. } if !spec.is_buffer => flat(&shard.name),
            Self::Expand(mesh, expand) if !spec.is_buffer => {
                let placed = expand.of_parameter(mesh, &spec.path, &spec.shape)?;
                Ok(Layout {
                    placements: placed.into_iter().map(|axis| axis.placement).collect(),
                    cut: Cut::Dims,
                    owner: None,
                })
            }
            _ => Ok(Layout::replicated(mesh)),
        }
    }

    /// Returns the passes that divide a step among the ranks and schedule it, without the last passes.
    pub(super) fn pipeline(
        &self,
        ranks: &Ranks,
        (options, owners): (&Options, &Owners),
        transforms: &[Arc<dyn GraphTransform>],
    ) -> Result<Pipeline, Error> {
        Ok(match self {
            Self::DataParallel(style) => {
                let insert = InsertCollectives {
                    num_ranks: ranks.size(),
                    style: *style,
                    axis: DATA_AXIS.into(),
                    replicate: None,
                    precision: options.precision.clone(),
                    owners: owners.by_path().clone(),
                };
                let axes = ranks.mesh()?.axes().to_vec();
                schedule::divided(insert, options, axes, transforms)
            }
            Self::Hybrid {
                strategy,
                shard,
                replicate,
            } => {
                let insert = InsertCollectives {
                    num_ranks: shard.size,
                    style: (*strategy).into(),
                    axis: shard.name.as_str().into(),
                    replicate: Some(replicate.clone()),
                    precision: options.precision.clone(),
                    owners: owners.by_path().clone(),
                };
                let axes = ranks.mesh()?.axes().to_vec();
                schedule::divided(insert, options, axes, transforms)
            }
            Self::Least(None) => {
                return Err(Error::Internal("placements are not decided".to_owned()));
            }
            Self::Expand(_, expand) | Self::Least(Some(expand)) => {
                let mesh = ranks.mesh()?;
                let axes = mesh.axes().to_vec();
                let insert = ExpandPlacements::new(expand.clone(), mesh);
                let insert = insert.precision(options.precision.clone());
                schedule::placed(insert, options, axes, transforms)
            }
        })
    }
}
