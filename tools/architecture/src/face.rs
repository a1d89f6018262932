//! The public names of a crate, read from its source.
//!
//! Glob re-exports and re-exports of modules are rejected, because their names could not be counted. The list is
//! therefore what the public modules define and re-export, and needs no compiler.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use syn::{Attribute, Item, ItemUse, Visibility};

use crate::modules::{Modules, imports};

/// Returns the public names of a crate, sorted, as paths without the crate's name. Modules, methods and fields are
/// excluded.
///
/// `crates` is the folder of the workspace's crates, and `folder` is the crate's folder in it. The public root module
/// `without` is excluded.
///
/// # Panics
///
/// If a file cannot be read or parsed, or if a glob or a module is re-exported.
pub fn names(crates: &Path, folder: &str, without: &str) -> Vec<String> {
    let face = Face {
        crates,
        modules: Modules::read(&crates.join(folder).join("src"), folder),
        without,
        others: RefCell::default(),
    };
    let mut names = Vec::new();
    face.collect(0, "", &mut names);
    face.macros(&mut names);
    names.sort();
    names
}

struct Face<'a> {
    crates: &'a Path,
    modules: Modules,
    without: &'a str,
    /// The other crates read so far, by folder, because each is asked about many names.
    others: RefCell<BTreeMap<String, Modules>>,
}

impl Face<'_> {
    /// Adds the names of a module and of the public modules in it. `prefix` is the module's path.
    fn collect(&self, module: usize, prefix: &str, names: &mut Vec<String>) {
        let this = &self.modules.modules[module];
        for item in &this.items {
            if let Item::Use(item) = item {
                if matches!(item.vis, Visibility::Public(_)) {
                    let reexported = self.reexported(module, item);
                    names.extend(reexported.into_iter().map(|name| format!("{prefix}{name}")));
                }
            } else if let Some((Visibility::Public(_), name)) = defined(item) {
                names.push(format!("{prefix}{name}"));
            }
        }
        for (name, child) in &this.public {
            if !prefix.is_empty() || name != self.without {
                self.collect(*child, &format!("{prefix}{name}::"), names);
            }
        }
    }

    /// Returns the names of a re-export.
    fn reexported(&self, module: usize, item: &ItemUse) -> Vec<String> {
        let mut names = Vec::new();
        for import in imports(item) {
            let path = import.path.join("::");
            let Some(name) = import.name else {
                panic!("`{path}::*` cannot be counted: name what it re-exports");
            };
            assert!(
                !self.is_module(module, &import.path),
                "`{path}` is a module, whose names cannot be counted: re-export its items"
            );
            names.push(name);
        }
        names
    }

    /// Returns true if a path leads to a module of this crate or of another one of the workspace, or is a crate.
    fn is_module(&self, module: usize, path: &[String]) -> bool {
        if self.modules.is_module(module, path) || path.len() == 1 {
            return true;
        }
        let Some(folder) = path[0].strip_prefix("burn_fsdp_") else {
            return false;
        };
        let src = self.crates.join(folder.replace('_', "-")).join("src");
        if !src.is_dir() {
            return false;
        }
        let mut others = self.others.borrow_mut();
        let other = others.entry(folder.to_owned());
        let other = other.or_insert_with(|| Modules::read(&src, folder));
        other.is_module(0, &path[1..])
    }

    /// Adds the exported macros, which are all at the root.
    fn macros(&self, names: &mut Vec<String>) {
        for module in &self.modules.modules {
            for item in &module.items {
                if let Item::Macro(item) = item
                    && let Some(name) = &item.ident
                    && item.attrs.iter().any(is_macro_export)
                {
                    names.push(name.to_string());
                }
            }
        }
    }
}

/// Returns the visibility and the name of an item that is counted.
fn defined(item: &Item) -> Option<(&Visibility, String)> {
    let (visibility, ident) = match item {
        Item::Const(item) => (&item.vis, &item.ident),
        Item::Enum(item) => (&item.vis, &item.ident),
        Item::ExternCrate(item) => (&item.vis, &item.ident),
        Item::Fn(item) => (&item.vis, &item.sig.ident),
        Item::Static(item) => (&item.vis, &item.ident),
        Item::Struct(item) => (&item.vis, &item.ident),
        Item::Trait(item) => (&item.vis, &item.ident),
        Item::TraitAlias(item) => (&item.vis, &item.ident),
        Item::Type(item) => (&item.vis, &item.ident),
        Item::Union(item) => (&item.vis, &item.ident),
        _ => return None,
    };
    Some((visibility, ident.to_string()))
}

fn is_macro_export(attribute: &Attribute) -> bool {
    attribute.path().is_ident("macro_export")
}
