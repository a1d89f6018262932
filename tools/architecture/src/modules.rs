//! The modules of a crate and their names, as the compiler resolves them: from `lib.rs` and `main.rs` down, with
//! re-exports followed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, iter};

use proc_macro2::TokenTree;
use syn::{Attribute, Expr, ExprLit, Item, ItemUse, Lit, Meta, UseTree, Visibility};

/// A module: a file, or an inline module in a file.
pub(crate) struct Module {
    pub(crate) file: usize,
    /// Items of the module itself, without the items of its child modules.
    pub(crate) items: Vec<Item>,
    parent: Option<usize>,
    root: usize,
    names: BTreeMap<String, Vec<Named>>,
    globs: Vec<Vec<String>>,
    /// Child modules that are public, with their names.
    pub(crate) public: Vec<(String, usize)>,
}

/// The meaning of a name in a module.
#[derive(Clone)]
enum Named {
    Module(usize),
    /// An item defined here. Only types have names below them.
    Item {
        is_type: bool,
    },
    /// An import of this path.
    Import(Vec<String>),
}

/// The target of a path.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    Module(usize),
    Item { file: usize, is_type: bool },
}

/// An import with its path, without a final `*`.
pub(crate) struct Import {
    pub(crate) path: Vec<String>,
    /// The name that it has in the importing module, or `None` for a `*`.
    pub(crate) name: Option<String>,
}

/// The modules of one crate.
pub(crate) struct Modules {
    /// Paths relative to `src`, separated by `/`. Test modules are skipped.
    pub(crate) files: Vec<String>,
    pub(crate) modules: Vec<Module>,
    /// The file of each macro, by name. Macros have one scope for the whole crate.
    macros: BTreeMap<String, usize>,
    /// The library's name, as its own binaries use it, and its module.
    library: Option<(String, usize)>,
    src: PathBuf,
}

impl Modules {
    /// Reads a crate from its source folder. `name` is the name of its library.
    pub(crate) fn read(src: &Path, name: &str) -> Self {
        let mut modules = Self {
            files: Vec::new(),
            modules: Vec::new(),
            macros: BTreeMap::new(),
            library: None,
            src: src.to_path_buf(),
        };
        for root in ["lib.rs", "main.rs"] {
            if src.join(root).is_file() {
                let module = modules.add_file(root.to_owned(), "", None);
                if root == "lib.rs" {
                    modules.library = Some((name.replace('-', "_"), module));
                }
            }
        }
        modules
    }

    /// Returns the files that define the item of a path, as seen from the module, with the item's name. Paths to
    /// modules and to other crates return nothing.
    pub(crate) fn definitions(&self, module: usize, path: &[String]) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        let mut targets = self.first(module, path, &mut Vec::new());
        for (at, segment) in path.iter().enumerate() {
            if at > 0 {
                targets = self.below(&targets, segment, &mut Vec::new());
            }
            let is_last = at + 1 == path.len();
            targets.retain(|target| match target {
                Target::Module(_) => true,
                Target::Item { file, is_type } => {
                    if *is_type || is_last {
                        found.push((*file, segment.clone()));
                    }
                    false
                }
            });
        }
        found.sort();
        found.dedup();
        found
    }

    /// Returns true if a path, as seen from the module, leads to a module of this crate that a re-export would expose.
    /// A private module and a function may share a name; the re-export then exposes the function.
    pub(crate) fn is_module(&self, module: usize, path: &[String]) -> bool {
        let targets = self.resolve(module, path, &mut Vec::new());
        let is_only = targets.len() == 1;
        let is_shown = |module: usize| {
            let parent = self.modules[module].parent;
            parent.is_none_or(|parent| {
                self.modules[parent]
                    .public
                    .iter()
                    .any(|(_, child)| *child == module)
            })
        };
        targets.iter().any(|target| match target {
            Target::Module(module) => is_only || is_shown(*module),
            Target::Item { .. } => false,
        })
    }

    /// Returns the file that defines a macro with this name.
    pub(crate) fn macro_definition(&self, name: &str) -> Option<usize> {
        self.macros.get(name).copied()
    }

    /// Adds a file and the modules below it. `inside` is the folder of its child modules.
    fn add_file(&mut self, path: String, inside: &str, parent: Option<usize>) -> usize {
        let full = self.src.join(&path);
        let text =
            fs::read_to_string(&full).unwrap_or_else(|error| panic!("{}: {error}", full.display()));
        let items = syn::parse_file(&text)
            .unwrap_or_else(|error| panic!("{}: {error}", full.display()))
            .items;
        self.files.push(path);
        self.add_module(self.files.len() - 1, items, inside, parent)
    }

    fn add_module(
        &mut self,
        file: usize,
        items: Vec<Item>,
        inside: &str,
        parent: Option<usize>,
    ) -> usize {
        let this = self.modules.len();
        self.modules.push(Module {
            file,
            items: Vec::new(),
            parent,
            root: parent.map_or(this, |parent| self.modules[parent].root),
            names: BTreeMap::new(),
            globs: Vec::new(),
            public: Vec::new(),
        });
        for item in items {
            if is_test(attributes(&item)) {
                continue;
            }
            if let Item::Mod(child) = item {
                let name = child.ident.to_string();
                let folder = format!("{inside}{name}/");
                let module = match child.content {
                    Some((_, items)) => self.add_module(file, items, &folder, Some(this)),
                    None => {
                        let beside = format!("{inside}{name}.rs");
                        let path = match given_path(&child.attrs) {
                            // From the folder of the file that declares it.
                            Some(path) => match self.files[file].rsplit_once('/') {
                                Some((folder, _)) => format!("{folder}/{path}"),
                                None => path,
                            },
                            None if self.src.join(&beside).is_file() => beside,
                            None => format!("{folder}mod.rs"),
                        };
                        self.add_file(path, &folder, Some(this))
                    }
                };
                if matches!(child.vis, Visibility::Public(_)) {
                    self.modules[this].public.push((name.clone(), module));
                }
                self.declare(this, name, Named::Module(module));
                continue;
            }
            if let Item::Use(item) = &item {
                for import in imports(item) {
                    match import.name {
                        Some(name) => self.declare(this, name, Named::Import(import.path)),
                        None => self.modules[this].globs.push(import.path),
                    }
                }
            }
            if let Item::Macro(item) = &item
                && let Some(name) = &item.ident
            {
                self.macros.insert(name.to_string(), file);
            }
            if let Some((name, is_type)) = defined(&item) {
                self.declare(this, name, Named::Item { is_type });
            }
            self.modules[this].items.push(item);
        }
        this
    }

    fn declare(&mut self, module: usize, name: String, named: Named) {
        let names = &mut self.modules[module].names;
        names.entry(name).or_default().push(named);
    }

    /// Returns the targets of a path. `open` contains the imports that are being followed.
    fn resolve(
        &self,
        module: usize,
        path: &[String],
        open: &mut Vec<(usize, String)>,
    ) -> Vec<Target> {
        let mut targets = self.first(module, path, open);
        for segment in &path[1..] {
            targets = self.below(&targets, segment, open);
        }
        targets
    }

    fn first(
        &self,
        module: usize,
        path: &[String],
        open: &mut Vec<(usize, String)>,
    ) -> Vec<Target> {
        let this = &self.modules[module];
        match path[0].as_str() {
            "crate" => vec![Target::Module(this.root)],
            "self" => vec![Target::Module(module)],
            "super" => this.parent.into_iter().map(Target::Module).collect(),
            name => {
                let found = self.lookup(module, name, open);
                if !found.is_empty() {
                    return found;
                }
                let library = self.library.iter().filter(|(library, _)| library == name);
                library.map(|(_, module)| Target::Module(*module)).collect()
            }
        }
    }

    /// Returns the targets of the next segment of a path. Names below a type belong to the type.
    fn below(
        &self,
        targets: &[Target],
        segment: &str,
        open: &mut Vec<(usize, String)>,
    ) -> Vec<Target> {
        let mut found = Vec::new();
        for target in targets {
            match *target {
                Target::Module(module) if segment == "self" => found.push(Target::Module(module)),
                Target::Module(module) if segment == "super" => {
                    found.extend(self.modules[module].parent.map(Target::Module));
                }
                Target::Module(module) => found.extend(self.lookup(module, segment, open)),
                Target::Item { is_type: true, .. } => found.push(*target),
                Target::Item { is_type: false, .. } => {}
            }
        }
        found
    }

    /// Returns the targets of a name in a module.
    fn lookup(&self, module: usize, name: &str, open: &mut Vec<(usize, String)>) -> Vec<Target> {
        let this = &self.modules[module];
        let key = (module, name.to_owned());
        let is_open = open.contains(&key);
        open.push(key);
        let mut found = Vec::new();
        for named in this.names.get(name).into_iter().flatten() {
            match named {
                Named::Module(module) => found.push(Target::Module(*module)),
                Named::Item { is_type } => found.push(Target::Item {
                    file: this.file,
                    is_type: *is_type,
                }),
                Named::Import(path) if !is_open => found.extend(self.resolve(module, path, open)),
                Named::Import(_) => {}
            }
        }
        if found.is_empty() && !is_open {
            for glob in &this.globs {
                for target in self.resolve(module, glob, open) {
                    if let Target::Module(module) = target {
                        found.extend(self.lookup(module, name, open));
                    }
                }
            }
        }
        open.pop();
        found.sort();
        found.dedup();
        found
    }
}

/// Returns the imports of a `use`.
pub(crate) fn imports(item: &ItemUse) -> Vec<Import> {
    fn collect(tree: &UseTree, before: &[String], into: &mut Vec<Import>) {
        let with = |name: String| {
            let path = before.iter().cloned();
            if name == "self" && !before.is_empty() {
                path.collect()
            } else {
                path.chain(iter::once(name)).collect::<Vec<_>>()
            }
        };
        let mut add = |path: Vec<String>, name: Option<String>| into.push(Import { path, name });
        match tree {
            UseTree::Path(tree_path) => {
                collect(&tree_path.tree, &with(tree_path.ident.to_string()), into);
            }
            UseTree::Name(name) => {
                let path = with(name.ident.to_string());
                let name = path.last().cloned();
                add(path, name);
            }
            UseTree::Rename(rename) => {
                let path = with(rename.ident.to_string());
                add(path, Some(rename.rename.to_string()));
            }
            UseTree::Glob(_) => add(before.to_vec(), None),
            UseTree::Group(group) => {
                for tree in &group.items {
                    collect(tree, before, into);
                }
            }
        }
    }
    let mut found = Vec::new();
    if item.leading_colon.is_none() {
        collect(&item.tree, &[], &mut found);
        found.retain(|import| !import.path.is_empty());
    }
    found
}

/// Returns true if a `use` re-exports its names.
pub(crate) fn is_reexport(item: &ItemUse) -> bool {
    !matches!(item.vis, Visibility::Inherited)
}

/// Returns true if the attributes restrict an item to tests.
pub(crate) fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let Meta::List(list) = &attribute.meta else {
            return attribute.path().is_ident("test");
        };
        let mut tokens = list.tokens.clone().into_iter();
        let is = |token: Option<TokenTree>, word: &str| matches!(token, Some(TokenTree::Ident(ident)) if ident == word);
        list.path.is_ident("cfg") && is(tokens.next(), "test") && tokens.next().is_none()
    })
}

/// Returns the name that an item defines, and whether it has further names below it.
fn defined(item: &Item) -> Option<(String, bool)> {
    let (ident, is_type) = match item {
        Item::Const(item) => (&item.ident, false),
        Item::Enum(item) => (&item.ident, true),
        Item::Fn(item) => (&item.sig.ident, false),
        Item::Static(item) => (&item.ident, false),
        Item::Struct(item) => (&item.ident, true),
        Item::Trait(item) => (&item.ident, true),
        Item::TraitAlias(item) => (&item.ident, true),
        Item::Type(item) => (&item.ident, true),
        Item::Union(item) => (&item.ident, true),
        Item::Macro(item) => (item.ident.as_ref()?, false),
        _ => return None,
    };
    Some((ident.to_string(), is_type))
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns the file that `#[path = ".."]` sets for a module.
fn given_path(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| {
        let Meta::NameValue(given) = &attribute.meta else {
            return None;
        };
        match &given.value {
            Expr::Lit(ExprLit {
                lit: Lit::Str(path),
                ..
            }) if given.path.is_ident("path") => Some(path.value()),
            _ => None,
        }
    })
}
