//! Fields that share a parameter: clones of one `Param`, with the same id.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, Param, ParamId};
use burn::tensor::Tensor;

use super::grouping::Ignored;
use crate::device;
use crate::error::Error;
use crate::inspect;
use crate::path::{self, Location};
use crate::policy::ShardPolicy;
use crate::seal::is_same_memory;
use crate::shown::plain;
use crate::survey::{Found, Survey};

const SHARDED_BEFORE: &str = "but an earlier call sharded only one; shard both in one call for the module that has both, \
    with `ShardPolicy::units` instead of the earlier call";
const OTHER_KIND: &str = "but differ in shape, type or backend; store one tensor, and transpose or cast its value where \
    it is used";
const OTHER_VALUES: &str =
    "but have different values; create the second by cloning the first when the module is built";
const FROZEN: &str = "but only one is frozen; freeze both, or `detach` the value where it is used";
const IGNORED: &str = "but the policy ignores one or both, so Burn's optimizers would train only the first; ignore \
    neither, or freeze and ignore both";
const PRECISION: &str = "but would compute in different types; name both in the policy's precision, or cast the value \
    where it is used";
const OTHER_CUT: &str = "but the policy cuts the second, or gives it to an owner; name the first, because the shard belongs to it";
const ADAPTED: &str = "but LoRA would adapt it; leave both out of its group, or adapt a layer with a parameter that is not shared";

/// The fields that share a parameter with an earlier field of the module.
#[derive(Default)]
pub(super) struct Ties {
    fields: Vec<Field>,
}

/// A field that shares the parameter of an earlier field.
#[derive(Clone)]
pub(super) struct Field {
    pub(super) found: Found,
    /// Path of the earlier field.
    pub(super) first: String,
    /// Number among the fields that share it; 0 for the first.
    pub(super) number: usize,
}

impl Ties {
    /// Finds the fields of `module` that share a parameter.
    ///
    /// # Errors
    ///
    /// [`Error::Tied`] for two fields that cannot share a parameter.
    pub(super) fn new<M: Module>(
        module: &M,
        survey: &Survey,
        ignored: &Ignored,
        policy: &ShardPolicy,
    ) -> Result<Self, Error> {
        let sharded = inspect::places(module).into_iter();
        let sharded: HashMap<_, _> = sharded.map(|(path, member)| (member.id, path)).collect();
        let mut firsts: HashMap<ParamId, (&Found, usize)> = HashMap::new();
        let mut fields = Vec::new();
        for found in &survey.parameters {
            if let Some(first) = sharded.get(&found.id) {
                return Err(tied(first, &found.path, SHARDED_BEFORE));
            }
            let (first, number) = firsts.entry(found.id).or_insert((found, 0));
            if first.path == found.path {
                continue;
            }
            *number += 1;
            let are_ignored = [&first.path, &found.path].map(|path| ignored.contains(path));
            if let Some(problem) = problem(first, found, are_ignored, policy) {
                return Err(tied(&first.path, &found.path, problem));
            }
            if are_ignored == [false; 2] && !found.shape.contains(&0) {
                fields.push(Field {
                    found: found.clone(),
                    first: first.path.clone(),
                    number: *number,
                });
            }
        }
        let ties = Self { fields };
        ties.check_values(module)?;
        Ok(ties)
    }

    pub(super) fn paths(&self) -> impl Iterator<Item = &str> + Clone {
        self.fields.iter().map(|field| field.found.path.as_str())
    }

    /// Returns true if the field at `path` shares an earlier field's parameter.
    pub(super) fn contains(&self, path: &str) -> bool {
        self.at(path).is_some()
    }

    /// Returns the fields that share the parameter of the field at `first`, in module order.
    pub(super) fn of<'a>(&'a self, first: &'a str) -> impl Iterator<Item = &'a Field> {
        self.fields.iter().filter(move |field| field.first == first)
    }

    pub(super) fn at(&self, path: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.found.path == path)
    }

    /// Rejects fields with one id but different values. Compares only fields that already have a value, and initializes
    /// none.
    fn check_values<M: Module>(&self, module: &M) -> Result<(), Error> {
        let mut values = Values {
            wanted: self
                .fields
                .iter()
                .map(|field| field.first.as_str())
                .chain(self.paths())
                .collect(),
            found: HashMap::new(),
        };
        if self.fields.is_empty() {
            return Ok(());
        }
        inspect::visit(module, &mut values);
        for field in &self.fields {
            let (first, second) = (&field.first, &field.found.path);
            let pair = (values.found.get(first), values.found.get(second));
            if let (Some(one), Some(other)) = pair
                && !is_same_memory(one, other)
                && one.clone().into_data() != other.clone().into_data()
            {
                return Err(tied(first, second, OTHER_VALUES));
            }
        }
        Ok(())
    }
}

/// Returns the reason that two fields with one id cannot share a parameter, if there is one.
fn problem(
    first: &Found,
    second: &Found,
    are_ignored: [bool; 2],
    policy: &ShardPolicy,
) -> Option<&'static str> {
    let paths = [&first.path, &second.path];
    let compute = [first, second].map(|found| found.compute_type(policy));
    let cut_by = |path: &str| {
        let mut cuts = policy.cuts.iter().rev();
        cuts.find(|(pattern, _)| pattern.prefix_of(path).is_some())
            .map(|(_, cut)| *cut)
    };
    let owned = |path: &str| {
        policy
            .one_owner
            .iter()
            .any(|pattern| pattern.prefix_of(path).is_some())
    };
    let is_second_cut = cut_by(&second.path).is_some_and(|cut| Some(cut) != cut_by(&first.path));
    let is_second_owned = owned(&second.path) && !owned(&first.path);
    let adapts = |path: &String| {
        let mut groups = policy.adapters.iter().map(|group| &group.lora.param_group);
        first.shape.len() == 2 && groups.any(|group| group.matches(&first.id, Some(path)))
    };
    let is_trained = first.is_trainable || second.is_trainable;
    let is_ignored = are_ignored != [false; 2];
    let are_alike = first.shape == second.shape
        && first.dtype == second.dtype
        && device::is_same_backend(&first.device, &second.device);
    let problems = [
        (!are_alike, OTHER_KIND),
        (first.is_trainable != second.is_trainable, FROZEN),
        (
            is_ignored && (is_trained || are_ignored != [true; 2]),
            IGNORED,
        ),
        (!is_ignored && compute[0] != compute[1], PRECISION),
        (!is_ignored && (is_second_cut || is_second_owned), OTHER_CUT),
        (!is_ignored && paths.into_iter().any(adapts), ADAPTED),
    ];
    let problem = problems.into_iter().find(|(is_so, _)| *is_so);
    problem.map(|(_, problem)| problem)
}

pub(super) fn tied(first: &str, second: &str, problem: &'static str) -> Error {
    Error::Tied {
        first: first.to_owned(),
        second: second.to_owned(),
        problem,
    }
}

/// A visitor that collects the flat values of initialized tied parameters.
struct Values<'a> {
    wanted: HashSet<&'a str>,
    found: HashMap<String, Tensor<1>>,
}

impl path::Visitor for Values<'_> {
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>) {
        let path = place.path();
        if self.wanted.contains(path.as_str()) && param.is_initialized() {
            let value = plain(param.base());
            let len = value.shape().num_elements();
            self.found.insert(path, value.reshape([len]));
        }
    }
}
