//! Tests that crates depend on each other in one direction only, that the files inside a crate do so as well, and
//! that nothing grows too large.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use burn_fsdp_architecture::face;
use burn_fsdp_architecture::imports::Imports;
use burn_fsdp_architecture::prose::Prose;
use burn_fsdp_architecture::sizes::{self, TooLarge};
use cargo_metadata::{DependencyKind, MetadataCommand};

/// For each crate of the workspace, the workspace crates that it may use.
const ALLOWED: [(&str, &[&str]); 26] = [
    ("burn-fsdp-mesh", &[]),
    ("burn-fsdp-rendezvous", &["burn-fsdp-mesh"]),
    (
        "burn-fsdp-transport",
        &["burn-fsdp-mesh", "burn-fsdp-rendezvous"],
    ),
    (
        "burn-fsdp-collectives",
        &[
            "burn-fsdp-mesh",
            "burn-fsdp-rendezvous",
            "burn-fsdp-transport",
        ],
    ),
    ("burn-fsdp-engine-tests", &["burn-fsdp-collectives"]),
    ("burn-fsdp-tensors", &["burn-fsdp-collectives"]),
    (
        "burn-fsdp-shard",
        &[
            "burn-fsdp-mesh",
            "burn-fsdp-collectives",
            "burn-fsdp-tensors",
        ],
    ),
    ("burn-fsdp-checkpoint", &["burn-fsdp-mesh"]),
    (
        "burn-fsdp-spmd",
        &[
            "burn-fsdp-mesh",
            "burn-fsdp-collectives",
            "burn-fsdp-tensors",
            "burn-fsdp-kernels",
        ],
    ),
    (
        "burn-fsdp-certificate",
        &[
            "burn-fsdp-mesh",
            "burn-fsdp-tensors",
            "burn-fsdp-kernels",
            "burn-fsdp-spmd",
        ],
    ),
    (
        "burn-fsdp-plan",
        &["burn-fsdp-collectives", "burn-fsdp-spmd"],
    ),
    (
        "burn-fsdp-glue",
        &[
            "burn-fsdp-mesh",
            "burn-fsdp-collectives",
            "burn-fsdp-tensors",
            "burn-fsdp-shard",
            "burn-fsdp-checkpoint",
            "burn-fsdp-spmd",
        ],
    ),
    (
        "burn-fsdp-train",
        &[
            "burn-fsdp-mesh",
            "burn-fsdp-collectives",
            "burn-fsdp-tensors",
            "burn-fsdp-shard",
            "burn-fsdp-checkpoint",
            "burn-fsdp-spmd",
            "burn-fsdp-certificate",
            "burn-fsdp-glue",
        ],
    ),
    (
        "burn-fsdp",
        &[
            "burn-fsdp-mesh",
            "burn-fsdp-collectives",
            "burn-fsdp-shard",
            "burn-fsdp-checkpoint",
            "burn-fsdp-glue",
            "burn-fsdp-train",
            "burn-fsdp-spmd",
            "burn-fsdp-certificate",
            "burn-fsdp-plan",
        ],
    ),
    ("burn-fsdp-data", &[]),
    ("burn-fsdp-kernels", &[]),
    ("burn-fsdp-models", &["burn-fsdp-kernels"]),
    ("burn-fsdp-runs", &[]),
    (
        "burn-fsdp-cli",
        &[
            "burn-fsdp",
            "burn-fsdp-data",
            "burn-fsdp-models",
            "burn-fsdp-runs",
        ],
    ),
    ("burn-fsdp-bench", &["burn-fsdp", "burn-fsdp-models"]),
    ("burn-fsdp-architecture", &[]),
    ("burn-fsdp-shard-tests", &["burn-fsdp-shard"]),
    ("burn-fsdp-spmd-tests", &[]),
    ("burn-fsdp-certificate-tests", &[]),
    ("burn-fsdp-plan-tests", &[]),
    ("burn-fsdp-facade-tests", &[]),
];

/// Crates that must not depend on Burn.
const WITHOUT_BURN: [&str; 8] = [
    "burn-fsdp-mesh",
    "burn-fsdp-rendezvous",
    "burn-fsdp-transport",
    "burn-fsdp-engine-tests",
    "burn-fsdp-collectives",
    "burn-fsdp-checkpoint",
    "burn-fsdp-data",
    "burn-fsdp-runs",
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

/// Remaining circles of imports: the crate and the circle's files. When a circle is removed, the test requires that
/// its line is removed.
const CIRCLES: [(&str, &[&str]); 0] = [];

#[test]
fn files_have_no_import_cycles() {
    let mut standing = BTreeSet::new();
    let mut said = String::new();
    for (name, _, imports) in crates() {
        for circle in imports.circles() {
            let files: Vec<String> = circle
                .iter()
                .map(|file| imports.files[*file].clone())
                .collect();
            let is_allowed = CIRCLES
                .iter()
                .any(|(of, allowed)| *of == name && *allowed == files);
            if !is_allowed {
                let _ = writeln!(said, "a circle of {} files in `{name}`:", files.len());
                for file in &circle {
                    for to in imports.of(*file).filter(|to| circle.contains(to)) {
                        let names: Vec<_> = imports.arrows[&(*file, to)]
                            .iter()
                            .map(String::as_str)
                            .collect();
                        let (from, to) = (&imports.files[*file], &imports.files[to]);
                        let _ = writeln!(said, "  {from} -> {to}: {}", names.join(", "));
                    }
                }
                let _ = writeln!(said, "as a line of the table: (\"{name}\", &{files:?}),");
            }
            standing.insert((name.clone(), files));
        }
    }
    for (name, files) in CIRCLES {
        let files: Vec<String> = files.iter().map(|file| (*file).to_owned()).collect();
        if !standing.contains(&(name.to_owned(), files.clone())) {
            let _ = writeln!(
                said,
                "this circle of `{name}` is gone: remove its line: {files:?}"
            );
        }
    }
    assert!(said.is_empty(), "\n{said}");
}

#[test]
fn nothing_is_too_large_without_an_exception() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("the page is there");
    let excused: BTreeMap<(String, String), &str> = page.lines().filter_map(exception).collect();
    let mut found = BTreeSet::new();
    let mut said = String::new();
    for (_, folder, imports) in crates() {
        for file in &imports.files {
            for TooLarge { kind, place, size } in
                sizes::too_large(&root(), &format!("{folder}/{file}"))
            {
                let key = (kind, place);
                if !excused.contains_key(&key) {
                    let _ = writeln!(said, "the {} `{}` {size}", key.0, key.1);
                }
                found.insert(key);
            }
        }
    }
    for ((kind, place), reason) in &excused {
        if !found.contains(&(kind.clone(), place.clone())) {
            let _ = writeln!(
                said,
                "ARCHITECTURE.md excuses the {kind} `{place}`, which is not too large"
            );
        }
        if reason.is_empty() {
            let _ = writeln!(
                said,
                "ARCHITECTURE.md gives no reason for the {kind} `{place}`"
            );
        }
    }
    assert!(said.is_empty(), "\n{said}");
}

/// Maximum number of public names of the facade outside its module `internals`, and of those at its root, which should
/// fit on a page. A user has to read them all.
const MOST_NAMES: (usize, usize) = (70, 26);

#[test]
fn the_facade_has_the_listed_names_and_no_others() {
    let names = face::names(&root().join("crates"), "burn-fsdp", "internals");
    let names: Vec<String> = names
        .iter()
        .map(|name| format!("burn_fsdp::{name}"))
        .collect();
    let at_root = |name: &&String| name.matches("::").count() == 1;
    let (all, root_only) = (names.len(), names.iter().filter(at_root).count());
    assert!(
        all <= MOST_NAMES.0 && root_only <= MOST_NAMES.1,
        "`burn-fsdp` has {all} public names, {root_only} of them at its root, but at most {} and {} are allowed; move \
         what few programs need to `internals`, or from the root to a module",
        MOST_NAMES.0,
        MOST_NAMES.1
    );
    let list = fs::read_to_string(root().join("docs/names.txt")).expect("the list is there");
    assert_same("docs/names.txt", list.lines(), &names);
    let page =
        fs::read_to_string(root().join("docs/book/src/names.md")).expect("the page is there");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let listed: Vec<String> = rows
        .filter_map(|row| row.split_once('`'))
        .map(|(name, _)| format!("burn_fsdp::{name}"))
        .collect();
    assert_same(
        "docs/book/src/names.md",
        listed.iter().map(String::as_str),
        &names,
    );
}

/// Asserts that a list has these names, each once.
fn assert_same<'a>(file: &str, list: impl Iterator<Item = &'a str>, names: &[String]) {
    let mut listed: Vec<&str> = list.collect();
    listed.sort_unstable();
    let mut said = String::new();
    for name in names.iter().filter(|name| !listed.contains(&name.as_str())) {
        let _ = writeln!(said, "{file} lacks `{name}`, which is public");
    }
    for name in listed
        .iter()
        .filter(|name| !names.iter().any(|is| is == *name))
    {
        let _ = writeln!(said, "{file} has `{name}`, which is not public");
    }
    for twice in listed.windows(2).filter(|pair| pair[0] == pair[1]) {
        let _ = writeln!(said, "{file} has `{}` twice", twice[0]);
    }
    assert!(said.is_empty(), "\n{said}");
}

/// The programs that a new user reads and copies.
#[test]
fn ordinary_programs_need_no_internals() {
    let examples = fs::read_dir(root().join("crates/burn-fsdp/examples")).expect("the examples");
    let examples = examples.map(|entry| entry.expect("it can be read").path());
    let mut files: Vec<PathBuf> = examples.filter(|path| path.is_file()).collect();
    assert!(files.len() > 5, "{files:?}");
    files.extend(["README.md", "docs/book/src/getting-started.md"].map(|page| root().join(page)));
    for file in files {
        let text = fs::read_to_string(&file).expect("it is text");
        assert!(
            !text.contains("internals::"),
            "{} uses `internals`, which has no promise of stability",
            file.display()
        );
    }
}

#[test]
fn prose_is_idiomatic() {
    let prose = Prose::read(&root());
    assert!(prose.excesses().is_empty(), "\n{prose}");
}

#[test]
fn the_page_names_existing_files() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("the page is there");
    let quoted = page.split('`').skip(1).step_by(2);
    let paths = quoted.filter(|quoted| {
        ["crates/", "docs/", "tools/"]
            .iter()
            .any(|place| quoted.starts_with(place))
    });
    let gone: Vec<&str> = paths
        .filter_map(|path| path.split_whitespace().next())
        .filter(|path| !path.contains('{') && !root().join(path).exists())
        .collect();
    assert!(gone.is_empty(), "ARCHITECTURE.md names {gone:?}");
}

/// Returns all crates of the workspace: folder name, source paths from the root of the repository, imports.
fn crates() -> Vec<(String, String, Imports)> {
    ["crates", "tools"]
        .into_iter()
        .flat_map(crates_in)
        .collect()
}

fn crates_in(place: &str) -> Vec<(String, String, Imports)> {
    let folders = fs::read_dir(root().join(place)).expect("the crates are there");
    let mut names: Vec<String> = folders
        .map(|folder| {
            folder
                .expect("it can be read")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.sort();
    let read = |name: String| {
        let folder = format!("{place}/{name}/src");
        let imports = Imports::read(&root().join(&folder), &name);
        (name, folder, imports)
    };
    names.into_iter().map(read).collect()
}

/// Parses a row of the table of exceptions in ARCHITECTURE.md: its kind, place and reason.
fn exception(row: &str) -> Option<((String, String), &str)> {
    let cells: Vec<&str> = row
        .strip_prefix('|')?
        .strip_suffix('|')?
        .split('|')
        .map(str::trim)
        .collect();
    let [kind @ ("file" | "function" | "struct"), place, reason] = cells[..] else {
        return None;
    };
    Some(((kind.to_owned(), place.replace('`', "")), reason))
}

/// Returns the root of the repository when the test runs. With a shared target folder, the test may have been
/// compiled in another clone.
fn root() -> PathBuf {
    let folder = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo runs the test");
    Path::new(&folder).join("../..")
}
