//! Placements that the user requests.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_fsdp_mesh::{Mesh, Pattern, Placement};

use crate::error::Error;
use crate::graph::AxisPlacement;
use crate::trace::LOSS_FACTOR;

/// The user's placements on each mesh axis: for parameters by path, and for tensors of the batch and activations by
/// name. All other parameters and tensors of the batch are replicated.
///
/// In a [`Pattern`], `*` matches one name, `conv*` matches the names with this prefix, and `**` matches any number of
/// names. If several patterns match, the last one for an axis applies. Optimizer states with their parameter's shape
/// have its placement, gradients are redistributed to it, and buffers are always replicated.
///
/// A dim of a parameter or named activation need not divide evenly, but must have at least one element per rank. It is
/// split as by `torch.chunk`, so the last ranks have fewer rows, or none. Operations that index along such a dim, or
/// reduce over it by anything but a sum, run on the whole dim.
///
/// The example places the feed-forward part of a transformer on the axis `model`, after Megatron-LM. The first layer is
/// sharded by columns and the second by rows, and one all-reduce sums the results:
///
/// ```
/// use burn_fsdp_mesh::Placement::Shard;
/// use burn_fsdp_spmd::Expand;
///
/// let expand = Expand::new()
///     .parameter("blocks.*.fc.weight", "model", Shard(1))
///     .parameter("blocks.*.fc.bias", "model", Shard(0))
///     .parameter("blocks.*.out.weight", "model", Shard(0))
///     // Data parallelism on the other axis.
///     .input("**", "data", Shard(0));
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Expand {
    parameters: Vec<Wish>,
    inputs: Vec<Wish>,
    activations: Vec<Wish>,
}

/// The placement that a pattern requests on an axis.
#[derive(Debug, Clone, PartialEq)]
struct Wish {
    pattern: Pattern,
    axis: String,
    placement: Placement,
}

impl Expand {
    /// Creates placements with everything replicated.
    pub fn new() -> Self {
        Self::default()
    }

    /// Places the parameters that match `pattern` on `axis`.
    #[must_use]
    pub fn parameter(mut self, pattern: &str, axis: &str, placement: Placement) -> Self {
        self.parameters.push(Wish::new(pattern, axis, placement));
        self
    }

    /// Places the batch's tensors that match `pattern` on `axis`. A batch of one tensor has the name `batch`; the
    /// tensors of a tuple are named `0`, `1` and so on.
    ///
    /// If the tensor is sharded, every rank passes its own part to the step, in the order of the ranks on the axis.
    /// Ranks with the same index on that axis must pass the same part.
    #[must_use]
    pub fn input(mut self, pattern: &str, axis: &str, placement: Placement) -> Self {
        self.inputs.push(Wish::new(pattern, axis, placement));
        self
    }

    /// Places on `axis` the activations whose [name](crate::named_activation) matches `pattern`. On other axes they
    /// keep the placements in which they are computed, and their gradients keep theirs on all axes.
    ///
    /// Nodes that read such an activation start from this placement. If it is sharded along the tokens, a norm or
    /// dropout runs on each rank's tokens (sequence parallelism), and the next product gathers them.
    #[must_use]
    pub fn activation(mut self, pattern: &str, axis: &str, placement: Placement) -> Self {
        self.activations.push(Wish::new(pattern, axis, placement));
        self
    }

    /// Returns the patterns of the activations with requested placements.
    pub(crate) fn asked_activations(&self) -> Vec<Pattern> {
        let wishes = self.activations.iter();
        wishes.map(|wish| wish.pattern.clone()).collect()
    }

    /// Returns the requested placements of an activation, one per axis; `None` without a request or on an axis of one
    /// rank.
    pub(super) fn asked(&self, name: &str, axes: &[AxisPlacement]) -> Vec<Option<Placement>> {
        let asked = |axis: &AxisPlacement| {
            let wish = last_wish(&self.activations, &axis.axis, name)?;
            (axis.num_ranks > 1).then_some(wish.placement)
        };
        axes.iter().map(asked).collect()
    }

    /// Returns the placements of an activation: the requested ones, and `now` on the other axes. `shape` is the whole
    /// shape.
    pub(super) fn of_activation(
        &self,
        name: &str,
        shape: &[usize],
        now: &[AxisPlacement],
    ) -> Result<Vec<AxisPlacement>, Error> {
        let asked = self.asked(name, now);
        let placed = now.iter().zip(&asked).map(|(axis, asked)| AxisPlacement {
            placement: asked.unwrap_or(axis.placement),
            ..axis.clone()
        });
        let placed: Vec<_> = placed.collect();
        // On an axis without a request, addends need no check because they stay addends.
        let checked = placed.iter().zip(&asked).filter(|(axis, asked)| {
            asked.is_some() || !matches!(axis.placement, Placement::Partial(_))
        });
        let checked: Vec<_> = checked.map(|(axis, _)| axis.clone()).collect();
        check("activation", name, shape, &checked)?;
        Ok(placed)
    }

    /// Returns the first input that no pattern matches; `None` if all match, or if no pattern shards inputs.
    pub(crate) fn unplaced<'a>(&self, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
        let cuts = |wish: &Wish| matches!(wish.placement, Placement::Shard(_));
        let mut names = names.filter(|_| self.inputs.iter().any(cuts));
        names.find(|name| !self.inputs.iter().any(|wish| wish.pattern.matches(name)))
    }

    /// Adds the input placements of `other` that this one lacks.
    pub(crate) fn add_inputs(&mut self, other: Self) {
        for wish in other.inputs {
            if !self.inputs.contains(&wish) {
                self.inputs.push(wish);
            }
        }
    }

    /// Returns the placements of a parameter, one per axis of the mesh.
    ///
    /// # Errors
    ///
    /// [`Error::Placement`] if the requested placements are impossible.
    pub(crate) fn of_parameter(
        &self,
        mesh: &Mesh,
        path: &str,
        shape: &[usize],
    ) -> Result<Vec<AxisPlacement>, Error> {
        let found = placements(&self.parameters, mesh, path);
        check("parameter", path, shape, &found)?;
        Ok(cut(found))
    }

    /// Returns the placements of a tensor of the joined batch, which has this shape: one per mesh axis.
    ///
    /// # Errors
    ///
    /// [`Error::Placement`] if the requested placements are impossible.
    pub fn of_joined_input(
        &self,
        mesh: &Mesh,
        name: &str,
        shape: &[usize],
    ) -> Result<Vec<AxisPlacement>, Error> {
        let found = self.of_input(mesh, name);
        check("input", name, shape, &found)?;
        Ok(cut(found))
    }

    /// Returns the shape of a tensor of the joined batch, from the shape of one rank's part.
    pub fn joined_shape(&self, mesh: &Mesh, name: &str, shape: &[usize]) -> Vec<usize> {
        joined(shape, &self.of_input(mesh, name))
    }

    /// Returns the requested placements of an input. Patterns do not apply to the loss factor, which is not a tensor of
    /// the batch.
    fn of_input(&self, mesh: &Mesh, name: &str) -> Vec<AxisPlacement> {
        if name == LOSS_FACTOR {
            placements(&[], mesh, name)
        } else {
            placements(&self.inputs, mesh, name)
        }
    }

    /// Rejects patterns that match nothing, and unknown axes.
    pub(crate) fn check_names<'a>(
        &self,
        mesh: &Mesh,
        parameters: impl Iterator<Item = &'a str> + Clone,
        inputs: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(), Error> {
        check_names("parameter", &self.parameters, mesh, parameters)?;
        // Names of activations are only known after the loss is traced.
        for wish in &self.activations {
            mesh.axis(&wish.axis)?;
        }
        check_names("input", &self.inputs, mesh, inputs)
    }
}

impl Wish {
    fn new(pattern: &str, axis: &str, placement: Placement) -> Self {
        Self {
            pattern: pattern.into(),
            axis: axis.to_owned(),
            placement,
        }
    }
}

fn placements(wishes: &[Wish], mesh: &Mesh, name: &str) -> Vec<AxisPlacement> {
    let axes = mesh.axes().iter().map(|axis| {
        let wanted = last_wish(wishes, &axis.name, name);
        AxisPlacement {
            axis: Arc::from(axis.name.as_str()),
            num_ranks: axis.size,
            placement: wanted.map_or(Placement::Replicate, |wish| wish.placement),
        }
    });
    axes.collect()
}

/// Returns the placement that applies to a name on an axis: the last that matches.
fn last_wish<'a>(wishes: &'a [Wish], axis: &str, name: &str) -> Option<&'a Wish> {
    let mut latest = wishes.iter().rev();
    latest.find(|wish| wish.axis == axis && wish.pattern.matches(name))
}

/// Sets the placement on axes of one rank to `Replicate`.
fn cut(mut placements: Vec<AxisPlacement>) -> Vec<AxisPlacement> {
    for axis in &mut placements {
        if axis.num_ranks == 1 {
            axis.placement = Placement::Replicate;
        }
    }
    placements
}

/// Returns the whole shape, from the shape of one rank's part.
fn joined(shape: &[usize], placements: &[AxisPlacement]) -> Vec<usize> {
    let mut joined = shape.to_vec();
    for axis in placements {
        if let Placement::Shard(dim) = axis.placement
            && let Some(size) = joined.get_mut(dim)
        {
            *size *= axis.num_ranks;
        }
    }
    joined
}

fn check(
    what: &'static str,
    name: &str,
    shape: &[usize],
    placements: &[AxisPlacement],
) -> Result<(), Error> {
    let refuse = |axis: &AxisPlacement, reason: String| Error::Placement {
        what,
        name: name.to_owned(),
        placement: format!("{} on axis {}", axis.placement, axis.axis),
        shape: shape.to_vec(),
        reason,
    };
    let mut cut: BTreeMap<usize, &str> = BTreeMap::new();
    for axis in placements {
        let dim = match axis.placement {
            Placement::Replicate => continue,
            Placement::Partial(_) => {
                return Err(refuse(axis, "nothing reduces it".to_owned()));
            }
            Placement::Shard(dim) => dim,
        };
        let reason = match shape.get(dim) {
            None => format!("it has {} dims", shape.len()),
            // Every rank passes its own part of an input, and all parts have the same size.
            Some(size) if what == "input" && !size.is_multiple_of(axis.num_ranks) => {
                format!("{size} cannot be cut into {} equal parts", axis.num_ranks)
            }
            Some(size) if *size < axis.num_ranks => {
                format!("{size} cannot be cut among {} ranks", axis.num_ranks)
            }
            Some(_) => match cut.insert(dim, &axis.axis) {
                None => continue,
                Some(other) => format!(
                    "axis {other} already cuts this dim: cut another dim along {}, or choose another placement on \
                     {other}",
                    axis.axis
                ),
            },
        };
        return Err(refuse(axis, reason));
    }
    Ok(())
}

fn check_names<'a>(
    what: &'static str,
    wishes: &[Wish],
    mesh: &Mesh,
    names: impl Iterator<Item = &'a str> + Clone,
) -> Result<(), Error> {
    for wish in wishes {
        mesh.axis(&wish.axis)?;
        if !names.clone().any(|name| wish.pattern.matches(name)) {
            let known: Vec<_> = names.take(8).collect();
            return Err(Error::UnknownName {
                what,
                name: wish.pattern.to_string(),
                known: known.join(", "),
            });
        }
    }
    Ok(())
}
