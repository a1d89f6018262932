//! Units with their paths in a module, from the current call and from earlier calls.

use std::sync::Arc;

use burn::module::Module;
use burn_fsdp_collectives::ProcessGroup;

use crate::copies::Copies;
use crate::error::Error;
use crate::inspect;
use crate::optim::gradients;
use crate::parameter::owned::RootLink;
use crate::spec::Groups;

/// A unit of the module that is being wrapped.
pub(super) struct Placed {
    pub(super) copies: Copies,
    pub(super) root_link: Arc<RootLink>,
    /// Path of the module whose wrapping created the unit, inside the module that is being wrapped now.
    pub(super) prefix: String,
}

/// Splits units into those in replicated modules, and those that a parent adopts.
pub(super) fn split_off_replicas(earlier: Vec<Placed>) -> (Vec<Placed>, Vec<Placed>) {
    let roots = earlier
        .iter()
        .filter(|placed| placed.copies.unit.is_replica);
    let roots: Vec<String> = roots.map(|placed| placed.prefix.clone()).collect();
    let is_inside = |prefix: &str| {
        let mut roots = roots.iter();
        roots.any(|root| {
            let rest = prefix.strip_prefix(root.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    };
    earlier
        .into_iter()
        .partition(|placed| is_inside(&placed.prefix))
}

/// Returns the units created by earlier calls, in module order.
pub(super) fn earlier_units<M: Module>(module: &M) -> Vec<Placed> {
    let mut units: Vec<Placed> = Vec::new();
    for (path, member) in &inspect::places(module) {
        let unit = &member.generation.unit;
        let mut known = units.iter().map(|placed| &placed.copies.unit);
        if known.any(|known| Arc::ptr_eq(known, unit)) {
            continue;
        }
        let own = &member.slot().path;
        let prefix = path.strip_suffix(own.as_str()).unwrap_or_default();
        units.push(Placed {
            copies: Copies::of(&member.generation),
            root_link: member.root_link().clone(),
            prefix: prefix.trim_end_matches('.').to_owned(),
        });
    }
    units
}

/// Rejects a unit whose ranks differ from `groups`: the ranks that hold the shards, and the replicas of each.
pub(super) fn check_groups(earlier: &Placed, groups: &Groups) -> Result<(), Error> {
    let own = &earlier.copies.unit.groups;
    let are_same = match (&own.replicas, &groups.replicas) {
        (None, None) => true,
        (Some(own), Some(replicas)) => gradients::is_same(own, replicas),
        _ => false,
    };
    if gradients::is_same(&own.shard, &groups.shard) && are_same {
        Ok(())
    } else {
        Err(Error::Group {
            unit: earlier.prefix.clone(),
            expected: names(groups),
            got: names(own),
        })
    }
}

fn names(groups: &Groups) -> String {
    let replicas = groups.replicas.as_ref().map(ProcessGroup::name);
    let replicas = replicas.map(|name| format!("`, replicated over `{name}"));
    format!("{}{}", groups.shard.name(), replicas.unwrap_or_default())
}
