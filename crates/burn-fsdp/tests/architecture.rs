//! The rooms depend on each other in one direction only.

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{DependencyKind, MetadataCommand};

/// For each crate of the workspace, the crates of the workspace that it may use.
const ALLOWED: [(&str, &[&str]); 9] = [
    ("burn-fsdp-mesh", &[]),
    ("burn-fsdp-collectives", &["burn-fsdp-mesh"]),
    (
        "burn-fsdp-shard",
        &["burn-fsdp-mesh", "burn-fsdp-collectives"],
    ),
    ("burn-fsdp-checkpoint", &["burn-fsdp-mesh"]),
    (
        "burn-fsdp-spmd",
        &["burn-fsdp-mesh", "burn-fsdp-collectives"],
    ),
    (
        "burn-fsdp-plan",
        &["burn-fsdp-collectives", "burn-fsdp-spmd"],
    ),
    (
        "burn-fsdp",
        &[
            "burn-fsdp-mesh",
            "burn-fsdp-collectives",
            "burn-fsdp-shard",
            "burn-fsdp-checkpoint",
            "burn-fsdp-spmd",
            "burn-fsdp-plan",
        ],
    ),
    ("burn-fsdp-models", &[]),
    ("burn-fsdp-cli", &["burn-fsdp", "burn-fsdp-models"]),
];

/// Crates that must not know Burn.
const WITHOUT_BURN: [&str; 3] = [
    "burn-fsdp-mesh",
    "burn-fsdp-collectives",
    "burn-fsdp-checkpoint",
];

#[test]
fn dependencies_flow_one_way() {
    let metadata = MetadataCommand::new()
        .no_deps()
        .exec()
        .expect("cargo metadata works in the workspace");
    let allowed: BTreeMap<_, BTreeSet<_>> = ALLOWED
        .iter()
        .map(|(name, uses)| (*name, uses.iter().copied().collect()))
        .collect();
    for package in &metadata.packages {
        let name = package.name.to_string();
        let allowed = allowed
            .get(name.as_str())
            .unwrap_or_else(|| panic!("`{name}` has no place in the architecture yet"));
        for dependency in &package.dependencies {
            let used = dependency.name.as_str();
            if dependency.kind != DependencyKind::Normal {
                continue;
            }
            let is_ours = used == "burn-fsdp" || used.starts_with("burn-fsdp-");
            assert!(
                !is_ours || allowed.contains(used),
                "`{name}` must not use `{used}`"
            );
            let is_burn = !is_ours && (used == "burn" || used.starts_with("burn-"));
            assert!(
                !(is_burn && WITHOUT_BURN.contains(&name.as_str())),
                "`{name}` must not know Burn, but uses `{used}`"
            );
        }
    }
}
