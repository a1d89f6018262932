//! The adapters that Burn's `apply_lora` has attached to a module before it is sharded.
//!
//! A parameter has one reparameterization, and Burn attaches the old one again after a mapper has attached another. So
//! adapters are detached first. Burn detaches one only by merging it into its weight, and shows its scale to no visitor.
//! Therefore each adapted weight is replaced by a matrix of one element, the adapter is merged into that, and the
//! weight is put back. The merged element shows the scale.

use std::any::Any;
use std::collections::{HashMap, HashSet};

use burn::module::{LoraAdapter, Module, Param, Reparameterization};
use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::error::Error;
use crate::path::{self, CONTAINER, FACTOR_A, FACTOR_B, Location, NAME};
use crate::policy::AdapterGroup;

/// The adapters of a module, by the path of the weight.
pub(super) type Adapters = HashMap<String, LoraAdapter>;

/// Returns the module without the adapters of `apply_lora`, and these adapters.
///
/// # Errors
///
/// [`Error::Option`] if `groups` attaches adapters as well, a part of the module is already sharded, or a factor has an
/// adapter; [`Error::Reparameterized`] for a reparameterization that is no such adapter.
pub(super) fn detached<M: Module>(
    module: M,
    groups: &[AdapterGroup],
) -> Result<(M, Adapters), Error> {
    let mut found = Found::default();
    path::visit(&module, &mut found);
    let Some(first) = found.adapted.first().cloned() else {
        return Ok((module, Adapters::new()));
    };
    if let Some(group) = groups.first() {
        return Err(refused(
            group.method.option(),
            "omitted for a module that already has adapters",
            format!("set for a module with an adapter at `{first}`"),
        ));
    }
    if let Some(factor) = found.adapted_factor {
        return Err(refused(
            "apply_lora",
            "called once for the whole module, because Burn keeps one adapter per weight; select several groups of \
             weights with one `ParamGroup`",
            format!("called twice: the factor `{factor}` has an adapter itself"),
        ));
    }
    match found.other {
        Some((path, name)) if name == NAME => {
            return Err(refused(
                "apply_lora",
                "followed by one call that shards the whole module; name its children with `ShardPolicy::units` \
                 instead of sharding them in calls of their own",
                format!(
                    "called for `{first}` of a module in which `{path}` was sharded by an earlier call"
                ),
            ));
        }
        Some((path, name)) => return Err(Error::Reparameterized { path, name }),
        None => {}
    }
    let paths: HashSet<_> = found.adapted.into_iter().collect();
    let scales = scales(&module, &paths)?;
    let mut take = Take::new(&paths, [0.0, 1.0, 1.0]);
    let merged = path::map(module, &mut take).materialize();
    let mut taken = take.taken;
    let adapters = paths.iter().map(|path| {
        let mut factor = |name| taken.remove(&format!("{path}.{name}"))?.downcast().ok();
        let (a, b) = (factor(FACTOR_A)?, factor(FACTOR_B)?);
        let adapter = LoraAdapter {
            a: *a,
            b: *b,
            scale: scales[path],
        };
        Some((path.clone(), adapter))
    });
    let adapters = adapters.collect::<Option<Adapters>>();
    let adapters = adapters.expect("Burn's adapters have two matrices as factors");
    Ok((path::map(merged, &mut PutBack { taken }), adapters))
}

/// Returns the scale of each adapter, which Burn does not return: measured with known numbers in place of its tensors.
fn scales<M: Module>(module: &M, paths: &HashSet<String>) -> Result<HashMap<String, f64>, Error> {
    let probed = |probe: Probe| {
        let mut take = Take::new(paths, probe);
        let merged = path::map(module.clone(), &mut take).materialize();
        let mut read = Read {
            paths,
            values: HashMap::new(),
        };
        path::visit(&merged, &mut read);
        read.values
    };
    let scales = probed([0.0, 1.0, 1.0]);
    // A reparameterization of the user's may have the same name.
    let sums = probed([3.0, 5.0, 7.0]);
    for path in paths {
        let (scale, sum) = (scales[path], sums[path]);
        if !scale.is_finite() {
            return Err(refused(
                "apply_lora",
                "called with a finite alpha and a rank of 1 or more",
                format!("called for `{path}` with a scale (alpha over rank) of {scale}"),
            ));
        }
        let expected = 3.0 + 35.0 * scale;
        if (sum - expected).abs() > 1e-9 * expected.abs().max(1.0) {
            return Err(Error::Reparameterized {
                path: path.clone(),
                name: LoraAdapter::NAME.to_owned(),
            });
        }
    }
    Ok(scales)
}

/// The error for a call that does not fit.
fn refused(option: &'static str, expected: &'static str, got: String) -> Error {
    Error::Option {
        option,
        expected,
        got,
    }
}

/// The elements that stand for a weight and for its two factors.
type Probe = [f64; 3];

/// A visitor that looks for adapted weights, and for one parameter with another reparameterization.
#[derive(Default)]
struct Found {
    adapted: Vec<String>,
    /// A factor that has an adapter itself.
    adapted_factor: Option<String>,
    /// The path, and the reparameterization's name.
    other: Option<(String, String)>,
}

impl path::Visitor for Found {
    fn enter(&mut self, place: &Location, name: &str, container: &str) {
        if container != CONTAINER {
            return;
        }
        if place.is_nested() {
            if self.adapted_factor.is_none() {
                self.adapted_factor = Some(place.path());
            }
            return;
        }
        if name == LoraAdapter::NAME {
            self.adapted.push(place.path());
        } else if self.other.is_none() {
            self.other = Some((place.path(), name.to_owned()));
        }
    }

    fn float<const D: usize>(&mut self, _place: &Location, _param: &Param<Tensor<D>>) {}
}

/// A mapper that takes the adapted weights and their factors, and leaves matrices of one element.
struct Take<'a> {
    paths: &'a HashSet<String>,
    probe: Probe,
    taken: HashMap<String, Box<dyn Any + Send>>,
}

impl<'a> Take<'a> {
    fn new(paths: &'a HashSet<String>, probe: Probe) -> Self {
        Self {
            paths,
            probe,
            taken: HashMap::new(),
        }
    }

    /// Returns the element that stands for the parameter at `path`, if it is taken.
    fn element(&self, path: &str) -> Option<f64> {
        let [weight, of_a, of_b] = self.probe;
        if self.paths.contains(path) {
            return Some(weight);
        }
        let of = |name: &str| {
            let weight = path.strip_suffix(name)?.strip_suffix('.')?;
            self.paths.contains(weight).then_some(())
        };
        of(FACTOR_A)
            .map(|()| of_a)
            .or_else(|| of(FACTOR_B).map(|()| of_b))
    }
}

impl path::Mapper for Take<'_> {
    fn float<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        let path = place.path();
        let Some(element) = self.element(&path) else {
            return param;
        };
        let id = param.id;
        self.taken.insert(path, Box::new(param));
        // The host computes in 64 bits on every machine, so no digit of the scale is lost.
        let data = TensorData::new(vec![element], [1; D]);
        Param::initialized(id, Tensor::from_data(data, (&Device::flex(), DType::F64)))
    }
}

/// A visitor that reads the merged elements.
struct Read<'a> {
    paths: &'a HashSet<String>,
    values: HashMap<String, f64>,
}

impl path::Visitor for Read<'_> {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        let path = place.path();
        if self.paths.contains(&path) {
            let value = param.base().into_data().iter::<f64>().next();
            self.values.insert(path, value.unwrap_or(f64::NAN));
        }
    }
}

/// A mapper that puts the taken weights back.
struct PutBack {
    taken: HashMap<String, Box<dyn Any + Send>>,
}

impl path::Mapper for PutBack {
    fn float<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>> {
        match self
            .taken
            .remove(&place.path())
            .map(|taken| taken.downcast())
        {
            Some(Ok(taken)) => *taken,
            _ => param,
        }
    }
}
