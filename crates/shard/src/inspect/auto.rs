//! Proposes units by size.

use std::collections::HashSet;

use burn::module::{Module, Param, ParamId};
use burn::tensor::Tensor;

use crate::inspect;
use crate::path::{self, Location};

/// Burn's names for modules that only contain others.
const CONTAINERS: [&str; 3] = ["Vec", "Array", "Tuple"];

/// Proposes units for [`ShardPolicy::units`](crate::ShardPolicy::units): the paths of the innermost modules with at
/// least `min_params` parameters (elements) that no unit inside them contains, children before parents.
///
/// Lists, arrays and tuples never become units. Neither does the module itself, which is the root anyway. The remaining
/// parameters belong to the enclosing unit. Sizes count whole parameters, even in a sharded module. Not collective: the
/// result depends only on the module's structure.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Device;
/// use burn_fsdp_shard::auto_units;
///
/// #[derive(Module, Debug)]
/// struct Net {
///     layers: Vec<Linear>,
/// }
///
/// let device = Device::flex();
/// let net = Net { layers: (0..2).map(|_| LinearConfig::new(10, 10).init(&device)).collect() };
/// assert_eq!(auto_units(&net, 100), ["layers.0", "layers.1"]);
/// assert_eq!(auto_units(&net, 200), [""; 0]);
/// ```
pub fn auto_units<M: Module>(module: &M, min_params: usize) -> Vec<String> {
    let mut sizes = Sizes {
        min_params: min_params.max(1),
        open: vec![Open::default()],
        units: Vec::new(),
        seen: HashSet::new(),
    };
    inspect::visit(module, &mut sizes);
    sizes.units
}

/// A module or parameter that the walk is inside.
#[derive(Default)]
struct Open {
    /// Number of elements that no unit inside this module contains.
    left: usize,
    /// Burn's name for the kind of module, known after a part of it is visited; `None` for a parameter.
    kind: Option<String>,
}

struct Sizes {
    min_params: usize,
    open: Vec<Open>,
    units: Vec<String>,
    /// Ids of counted parameters, because a parameter that several fields share counts once.
    seen: HashSet<ParamId>,
}

impl path::Visitor for Sizes {
    fn enter(&mut self, _place: &Location, _name: &str, container: &str) {
        if let Some(parent) = self.open.last_mut() {
            parent.kind = Some(container.to_owned());
        }
        self.open.push(Open::default());
    }

    fn exit(&mut self, place: &Location) {
        let Some(closed) = self.open.pop() else {
            return;
        };
        let is_module = closed
            .kind
            .is_some_and(|kind| !CONTAINERS.contains(&kind.as_str()));
        if is_module && closed.left >= self.min_params {
            self.units.push(place.path());
        } else if let Some(parent) = self.open.last_mut() {
            parent.left += closed.left;
        }
    }

    fn float<const D: usize>(&mut self, _place: &Location, param: &Param<Tensor<D>>) {
        if let Some(open) = self.open.last_mut()
            && self.seen.insert(param.id)
        {
            open.left += param.lazy_shape().num_elements();
        }
    }
}
