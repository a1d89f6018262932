//! The public names at a crate's root.

use std::fs;
use std::path::Path;

use syn::{Item, Visibility};

use crate::modules::{imports, is_reexport};

/// Returns the public names of a file that are not modules. A `*` is rejected, because it cannot be counted.
pub fn names(file: &Path) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    let mut names = Vec::new();
    for item in &parsed.items {
        let defined = match item {
            Item::Use(item) if is_reexport(item) => {
                for import in imports(item) {
                    let path = import.path.join("::");
                    let name = import.name;
                    names.push(name.unwrap_or_else(|| panic!("{file:?} re-exports `{path}::*`")));
                }
                continue;
            }
            Item::Const(item) => (&item.vis, &item.ident),
            Item::Enum(item) => (&item.vis, &item.ident),
            Item::Fn(item) => (&item.vis, &item.sig.ident),
            Item::Static(item) => (&item.vis, &item.ident),
            Item::Struct(item) => (&item.vis, &item.ident),
            Item::Trait(item) => (&item.vis, &item.ident),
            Item::Type(item) => (&item.vis, &item.ident),
            _ => continue,
        };
        if matches!(defined.0, Visibility::Public(_)) {
            names.push(defined.1.to_string());
        }
    }
    names
}
