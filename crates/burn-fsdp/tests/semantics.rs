//! The tables of `docs/semantics.md` name existing tests and items, and mark weaker guarantees.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The folder of this crate when the test runs. The compiled path may belong to another clone, because of a shared
/// target folder.
fn crate_folder() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR")
        .expect("cargo runs the test")
        .into()
}

/// The file of a test's module, by the binary and the module of its name.
fn file_of(binary: &str, module: Option<&str>) -> PathBuf {
    let crates = crate_folder().join("..");
    let module = module.unwrap_or("main");
    match binary {
        "eager" | "extras" | "memory" => crates.join(format!("shard/tests/{binary}/{module}.rs")),
        "spmd" => crates.join(format!("spmd/tests/spmd/{module}.rs")),
        "cli" => crates.join(format!("cli/tests/cli/{module}.rs")),
        other => {
            let tests = crates.join(format!("{other}/tests"));
            // The tests of a crate's file, in a binary of its own or together with others.
            let files = [
                "{}.rs",
                "{}/main.rs",
                "../facade-tests/{}.rs",
                "../facade-tests/{}/main.rs",
            ]
            .map(|form| tests.join(form.replace("{}", module)));
            let found = files.iter().find(|file| file.exists());
            found.unwrap_or(&files[0]).clone()
        }
    }
}

fn page() -> String {
    let page = crate_folder().join("../../docs/semantics.md");
    std::fs::read_to_string(page).expect("the page")
}

/// The cells of each row: its ids, its place, its tests. Cells do not contain bars.
fn rows(page: &str) -> Vec<[&str; 3]> {
    let lines = page.lines().filter(|line| line.starts_with("| "));
    let cells = lines.map(|line| {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        [(); 3].map(|()| {
            cells
                .next()
                .unwrap_or_else(|| panic!("three cells: {line}"))
        })
    });
    cells.filter(|[ids, ..]| *ids != "row").collect()
}

/// The texts in backquotes.
fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.len() > 1)
}

/// The problem with a name, if there is one.
fn fault(name: &str) -> Option<String> {
    let parts: Vec<_> = name.split("::").collect();
    let (binary, module, test) = match parts[..] {
        ["memory"] => ("memory", None, None),
        ["memory", test] => ("memory", None, Some(test)),
        [binary, module] => (binary, Some(module), None),
        [binary, module, test] => (binary, Some(module), Some(test)),
        // A module inside of the module.
        [binary, module, _, test] => (binary, Some(module), Some(test)),
        _ => return Some("is no test's name".to_owned()),
    };
    let file = match parts[..] {
        // Of a binary with modules, in a crate with several.
        [of, binary, inner, _] => {
            let tests = crate_folder().join(format!("../{of}/tests/{binary}"));
            Some(tests.join(format!("{inner}.rs"))).filter(|file| file.exists())
        }
        _ => None,
    };
    let file = file.unwrap_or_else(|| file_of(binary, module));
    let Ok(text) = std::fs::read_to_string(&file) else {
        return Some(format!("has no file {}", file.display()));
    };
    let is_there = match test {
        // A test, or a module of tests inside of the module.
        Some(test) => {
            let mut lines = text.lines().map(str::trim_start);
            let (function, inner) = (format!("fn {test}("), format!("mod {test} {{"));
            let mut is_test = false;
            lines.any(|line| {
                let found = is_test && line.starts_with(&function);
                is_test = line.starts_with("#[test]") || is_test && line.starts_with("#[");
                found || line.starts_with(&inner)
            })
        }
        // Some have their own harness.
        None => text.contains("#[test]") || text.contains("fn main()"),
    };
    (!is_there).then(|| format!("is not in {}", file.display()))
}

#[test]
fn every_test_that_a_row_names_exists() {
    let page = page();
    let mut names = 0;
    let mut faults = Vec::new();
    for [_, _, tests] in rows(&page) {
        for name in quoted(tests).filter(|name| name.contains("::") || *name == "memory") {
            names += 1;
            faults.extend(fault(name).map(|fault| format!("{name} {fault}")));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(names > 200, "{names} names");
}

/// Names of other systems, and of no item.
const ELSEWHERE: [&str; 4] = ["found_inf", "set_is_last_backward", "ci", "nightly"];

fn read_sources(folder: &Path, into: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            read_sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).expect("a readable file");
            into.extend(words(&text).map(str::to_owned));
        }
    }
}

#[test]
fn every_name_in_a_row_is_in_the_sources() {
    let mut sources = BTreeSet::new();
    for entry in std::fs::read_dir(crate_folder().join("..")).expect("the crates") {
        read_sources(&entry.expect("an entry").path().join("src"), &mut sources);
    }
    let page = page();
    let mut faults = Vec::new();
    for [ids, place, _] in rows(&page) {
        let names = quoted(place).flat_map(words);
        let unknown = names.filter(|name| !sources.contains(*name) && !ELSEWHERE.contains(name));
        faults.extend(unknown.map(|name| format!("{ids}: {name}")));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The mark at the beginning of a row, which names a missing part.
fn mark(place: &str) -> Option<&'static str> {
    let marks = ["**weaker**", "**missing**"];
    let mark = marks.into_iter().find(|mark| place.starts_with(mark))?;
    let reason = &place[mark.len()..];
    let begins = [
        ": ",
        ", as ",
        " in ",
        " on ",
        " for ",
        " from ",
        " compiled: ",
        " compiled by ",
    ];
    let is_reason = begins.iter().any(|begin| reason.starts_with(begin));
    assert!(is_reason, "no reason: {place}");
    Some(mark)
}

/// A row with a weaker guarantee begins with a mark, however else it is expressed: with another spelling, in the
/// middle, or by reference to another row.
#[test]
fn weaker_rows_begin_with_a_mark() {
    const SIGNS: [&str; 8] = [
        "weaker",
        "missing",
        "not tested",
        "untested",
        "only the refusals",
        "not offered",
        "later:",
        "not by placements",
    ];
    let page = page();
    let rows = rows(&page);
    let mut marks = BTreeMap::new();
    for [ids, place, _] in &rows {
        let mark = mark(place);
        let lower = place.to_lowercase();
        let sign = SIGNS.into_iter().find(|sign| lower.contains(sign));
        assert!(sign.is_none() || mark.is_some(), "{ids}: {place}");
        marks.extend(words(ids).map(|id| (id, mark)));
    }
    for [ids, place, _] in &rows {
        // "as W17", or "see W17", means the same as W17.
        let [like, see] = ["as ", "see "].map(|link| {
            let links = place.match_indices(link);
            links.map(move |(at, _)| &place[at + link.len()..])
        });
        let others = like.chain(see);
        for other in others.filter_map(|text| words(text).next()) {
            let is_marked = marks.get(other).copied().flatten().is_some();
            assert!(!is_marked || mark(place).is_some(), "{ids} as {other}");
        }
    }
    assert!(marks.len() > 150, "{} rows", marks.len());
}

/// Every row without a mark names a test.
#[test]
fn rows_without_a_mark_name_a_test() {
    let page = page();
    // The exceptions: there is nothing to test, or the row refers to another one with the test.
    let begins = [
        "does not apply",
        "do not apply",
        "cannot happen",
        "out of scope",
        "as ",
    ];
    let of_nothing = |place: &str| begins.iter().any(|begin| place.starts_with(begin));
    let without = rows(&page).into_iter().filter(|[_, place, tests]| {
        mark(place).is_none() && !of_nothing(place) && quoted(tests).next().is_none()
    });
    let without: Vec<_> = without
        .map(|[ids, place, _]| format!("{ids}: {place}"))
        .collect();
    assert!(without.is_empty(), "{}", without.join("\n"));
}
