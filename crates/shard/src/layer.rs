//! Burn's layers that compute in only one type, regardless of the types of their parameters and inputs.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::{DType, Device};

use crate::error::Error;
use crate::path::Location;

/// Burn's name for the layer that computes in the type of its running states.
const BATCH_NORM: &str = "Struct:BatchNorm";
/// Burn's names for the layers that compute in the device's default type: they create their initial states and outputs
/// in it.
const RECURRENT: [&str; 3] = ["Struct:Lstm", "Struct:Gru", "Struct:Rnn"];
/// Burn's name for a part of every recurrent layer. A user's struct with the name of such a layer lacks it.
const GATE: &str = "Struct:GateController";

/// A Burn layer that computes in only one type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layer {
    path: String,
    /// Burn's name for the kind of layer.
    kind: &'static str,
    /// The only type in which it computes.
    pub(crate) dtype: DType,
}

/// Returns the layer that contains the parameter at `place`, if it computes in only one type. `containers` are Burn's
/// names for the kinds of the enclosing modules. For a layer with running states, the type is set later.
pub(crate) fn around(
    place: &Location,
    containers: &[String],
    device: &Device,
) -> Option<Arc<Layer>> {
    let known = [BATCH_NORM].into_iter().chain(RECURRENT);
    let (depth, kind) = known
        .filter_map(|kind| Some((containers.iter().rposition(|other| other == kind)?, kind)))
        .max()?;
    let below = containers.get(depth + 1).map(String::as_str);
    // A user's struct may have the same name.
    let is_burns = match kind {
        BATCH_NORM => below.is_none(),
        _ => containers[depth..]
            .iter()
            .any(|container| container == GATE),
    };
    is_burns.then(|| {
        Arc::new(Layer {
            path: place.path_to(depth),
            kind: kind.trim_start_matches("Struct:"),
            dtype: device.settings().float_dtype.into(),
        })
    })
}

impl Layer {
    /// Returns the layer with its final type: the type of its running states, if it has any. `states` has the types of
    /// the module's running states, by path. Returns `None` if it is not the layer that its name suggests.
    pub(crate) fn settled(&self, states: &HashMap<String, DType>) -> Option<Arc<Self>> {
        if format!("Struct:{}", self.kind) != BATCH_NORM {
            return Some(Arc::new(self.clone()));
        }
        let state = |name: &str| match self.path.as_str() {
            "" => states.get(name),
            path => states.get(&format!("{path}.{name}")),
        };
        let (mean, variance) = (state("running_mean")?, state("running_var")?);
        (mean == variance).then(|| {
            Arc::new(Self {
                dtype: *mean,
                ..self.clone()
            })
        })
    }

    pub(crate) fn refuses(&self, param: &str, compute: DType) -> Error {
        Error::LayerType {
            layer: format!("`{}` ({})", self.path, self.kind),
            param: param.to_owned(),
            expected: format!("{:?}", self.dtype),
            got: format!("{compute:?}"),
        }
    }
}
