//! The table of `docs/semantics.md` names tests that exist.

use std::path::PathBuf;

/// The folder of this crate as the test runs. What is compiled may come from another clone, by a shared target folder.
fn crate_folder() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR")
        .expect("cargo runs the test")
        .into()
}

/// Where the module of a test lies, by the binary and the module of its name.
fn file_of(binary: &str, module: Option<&str>) -> PathBuf {
    let crates = crate_folder().join("..");
    let module = module.unwrap_or("main");
    match binary {
        "eager" | "extras" => crates.join(format!("shard/tests/{binary}/{module}.rs")),
        "memory" => crates.join("shard/tests/memory/main.rs"),
        "spmd" => crates.join(format!("spmd/tests/spmd/{module}.rs")),
        "cli" => crates.join(format!("cli/tests/cli/{module}.rs")),
        other => crates.join(format!("{other}/tests/{module}.rs")),
    }
}

/// What is wrong with a name, if something is.
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
    let file = file_of(binary, module);
    let Ok(text) = std::fs::read_to_string(&file) else {
        return Some(format!("has no file {}", file.display()));
    };
    let is_there = match test {
        // A test, or a module of tests inside of the module.
        Some(test) => {
            let mut lines = text.lines().map(str::trim_start);
            let (function, inner) = (format!("fn {test}("), format!("mod {test} {{"));
            lines.any(|line| line.starts_with(&function) || line.starts_with(&inner))
        }
        None => text.contains("#[test]"),
    };
    (!is_there).then(|| format!("is not in {}", file.display()))
}

#[test]
fn every_test_that_a_row_names_exists() {
    let page = crate_folder().join("../../docs/semantics.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let mut names = 0;
    let mut faults = Vec::new();
    for line in page.lines().filter(|line| line.starts_with("| ")) {
        // The last cell but for the border; cells have no bars of their own.
        let Some(tests) = line.trim_end().trim_end_matches('|').rsplit('|').next() else {
            continue;
        };
        let quoted = tests.split('`').skip(1).step_by(2);
        for name in quoted.filter(|name| name.contains("::") || *name == "memory") {
            names += 1;
            faults.extend(fault(name).map(|fault| format!("{name} {fault}")));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(names > 200, "{names} names");
}

/// A mark says what is missing, and stands at the beginning of what a row says.
#[test]
fn marks_are_explained() {
    let page = crate_folder().join("../../docs/semantics.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let rows = page.lines().filter(|line| line.starts_with("| "));
    for row in rows {
        for mark in ["**weaker**", "**missing**"] {
            if let Some((_, reason)) = row.split_once(mark) {
                let is_reason = reason.starts_with(": ") || reason.starts_with(", ");
                assert!(is_reason, "{row}");
            }
        }
    }
}
