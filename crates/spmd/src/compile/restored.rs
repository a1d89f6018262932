//! States of the optimizer that were set, and where a graph has them.

use burn::tensor::TensorData;

use crate::error::Error;
use crate::graph::{Graph, Parameter, ParameterLayout, Role};
use crate::parts::{localize, padded, part_shape};
use crate::ranks::Ranks;

/// A state that was set before there was a graph.
#[derive(Debug)]
pub(super) enum Restored {
    /// Of all ranks.
    Whole(TensorData),
    /// This rank's part, without padding.
    Part(TensorData),
}

impl Restored {
    /// As long as nothing is cut, a part is the whole, whatever the first graph will make of it.
    pub(super) fn of(data: TensorData, layout: &ParameterLayout) -> Self {
        match layout {
            ParameterLayout::Whole => Self::Whole(data),
            ParameterLayout::Flat(_) | ParameterLayout::Placed(_) => Self::Part(data),
        }
    }

    /// Refuses what is not a state of that place.
    pub(super) fn check(&self, place: &Parameter, slot: &str, ranks: &Ranks) -> Result<(), Error> {
        let (shape, data) = match self {
            Self::Whole(data) => (place.shape.clone(), data),
            Self::Part(data) => (part_shape(&place.shape, &place.layout, ranks), data),
        };
        match data.shape().to_vec() == shape && data.dtype() == place.dtype {
            true => Ok(()),
            false => Err(Error::mismatch(
                "optimizer state",
                format!("{} {slot}", place.path),
                (&shape, place.dtype),
                data,
            )),
        }
    }

    /// As this rank holds it in a graph.
    pub(super) fn into_local(self, place: &Parameter, ranks: &Ranks) -> Result<TensorData, Error> {
        match self {
            Self::Whole(data) => localize(&data, &place.layout, ranks),
            Self::Part(data) => Ok(padded(data, &place.layout)),
        }
    }
}

/// A state of the optimizer as if it were a parameter: one of the parameter's shape is divided like it, and any
/// other is whole.
pub(super) fn state_of(graph: &Graph, path: &str, slot: &str) -> Result<Parameter, Error> {
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
    let like = graph.value(parameter.value);
    let is_like = like.is_some_and(|like| like.shape == value.shape);
    let (shape, layout) = match is_like {
        true => (parameter.shape.clone(), parameter.layout.clone()),
        false => (value.shape.clone(), ParameterLayout::Whole),
    };
    Ok(Parameter {
        value: value.id,
        shape,
        layout,
        dtype: value.dtype,
        ..parameter.clone()
    })
}
