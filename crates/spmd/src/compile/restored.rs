//! Optimizer states that were set, and the values of a graph to which they belong.

use burn::tensor::TensorData;
use burn_fsdp_mesh::Layout;

use crate::error::Error;
use crate::graph::{Graph, Parameter, Role};
use crate::parts::Divided;
use crate::ranks::Ranks;
use crate::trace::Slot;

/// An optimizer state that the caller set, with which the next step begins.
#[derive(Debug)]
pub(super) enum Restored {
    /// The whole state.
    Whole(TensorData),
    /// This rank's part, without padding, and its layout.
    Part(TensorData, Layout),
}

impl Restored {
    /// Wraps this rank's part in the given layout. Under a whole layout the part is the whole state, even if the first
    /// graph divides it.
    pub(super) fn of(data: TensorData, layout: &Layout) -> Self {
        if layout.is_whole() {
            Self::Whole(data)
        } else {
            Self::Part(data, layout.clone())
        }
    }

    /// Rejects data whose shape or type differs from the state's.
    pub(super) fn check(&self, place: &Parameter, slot: &str, ranks: &Ranks) -> Result<(), Error> {
        let (shape, data) = match self {
            Self::Whole(data) => (place.shape.clone(), data),
            Self::Part(data, layout) => (under(place, layout, ranks).part_shape()?, data),
        };
        if data.shape().to_vec() == shape && data.dtype() == place.dtype {
            Ok(())
        } else {
            Err(Error::mismatch(
                "optimizer state",
                format!("{} {slot}", place.path),
                (&shape, place.dtype),
                data,
            ))
        }
    }

    /// Returns this rank's part in the graph's layout. All ranks must call it if the part was set in another layout.
    pub(super) fn into_local(self, place: &Parameter, ranks: &Ranks) -> Result<TensorData, Error> {
        match self {
            Self::Whole(data) => divided(place, ranks).localize(&data),
            Self::Part(data, layout) => {
                let set = under(place, &layout, ranks);
                set.relaid(&place.path, set.padded(data)?, &place.layout)
            }
        }
    }
}

/// Describes how the ranks divide a parameter or state of a graph under another layout.
fn under<'a>(place: &'a Parameter, layout: &'a Layout, ranks: &'a Ranks) -> Divided<'a> {
    Divided {
        shape: &place.shape,
        layout,
        ranks,
    }
}

/// Describes how the ranks divide a parameter or state of a graph.
pub(super) fn divided<'a>(place: &'a Parameter, ranks: &'a Ranks) -> Divided<'a> {
    Divided {
        shape: &place.shape,
        layout: &place.layout,
        ranks,
    }
}

/// Returns an optimizer state as if it were a parameter. A state of the parameter's shape is divided like the
/// parameter, and any other is whole. The owner of a parameter has its states whole. `slots` are the tensors of the
/// optimizer's state.
pub(super) fn state_of(
    graph: &Graph,
    path: &str,
    slots: &[Slot],
    slot: &str,
) -> Result<Parameter, Error> {
    let parameter = graph.parameter(path);
    let states = parameter.map(|parameter| parameter.states.as_slice());
    let states = states.unwrap_or_default().iter();
    let named = states.filter_map(|id| {
        let value = graph.value(*id)?;
        match &value.role {
            Role::State { slot, .. } => Some((value, slot)),
            _ => None,
        }
    });
    let named: Vec<_> = named.collect();
    let found = named.iter().find(|(_, other)| ***other == *slot);
    let (Some(parameter), Some((value, _))) = (parameter, found) else {
        let known: Vec<_> = named.iter().map(|(_, slot)| slot.as_ref()).collect();
        return Err(Error::UnknownName {
            what: "optimizer state",
            name: format!("{path} {slot}"),
            known: known.join(", "),
        });
    };
    let is_whole = parameter.whole_states.contains(&value.id);
    let known = slots.iter().find(|known| *known.name == *slot);
    let (own, dtype) = match known {
        Some(known) => (known.shape.clone(), known.dtype),
        None => (value.shape.clone(), value.dtype),
    };
    let (shape, layout) = match (is_whole, parameter.layout.owner) {
        (true, _) => (own, Layout::one_rank()),
        (false, Some(_)) => (own, parameter.layout.clone()),
        (false, None) => (parameter.shape.clone(), parameter.layout.clone()),
    };
    Ok(Parameter {
        value: value.id,
        shape,
        layout,
        dtype,
        ..parameter.clone()
    })
}
