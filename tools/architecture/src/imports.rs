//! The imports between the files of one crate.
//!
//! An arrow `a.rs -> b.rs` means that a path in `a.rs` leads to an item defined in `b.rs`. Re-exports are followed;
//! neither they nor `mod child` are arrows. Methods cannot be followed without types, so methods that an `impl` in
//! another file adds to a type have no arrow.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItemFn, ItemFn, ItemUse, Macro, Meta, PatIdent};

use crate::modules::{Modules, imports, is_reexport, is_test};

/// The files of a crate and the imports of each.
#[derive(Debug)]
pub struct Imports {
    /// Paths relative to `src`, separated by `/`.
    pub files: Vec<String>,
    /// The imported names, from the importing file to the defining file.
    pub arrows: BTreeMap<(usize, usize), BTreeSet<String>>,
}

impl Imports {
    /// Reads a crate from its source folder. `name` is the name of its library.
    pub fn read(src: &Path, name: &str) -> Self {
        let modules = Modules::read(src, name);
        let mut arrows = BTreeMap::new();
        for module in 0..modules.modules.len() {
            let mut reader = Reader {
                modules: &modules,
                module,
                bound: BTreeSet::new(),
                arrows: &mut arrows,
            };
            for item in &modules.modules[module].items {
                reader.visit_item(item);
            }
        }
        Self {
            files: modules.files,
            arrows,
        }
    }

    /// Returns the groups of files that import each other in a circle, by path: the strongly connected components
    /// with more than one file (Tarjan).
    pub fn circles(&self) -> Vec<Vec<usize>> {
        let mut search = Search {
            imports: self,
            number: vec![None; self.files.len()],
            low: vec![0; self.files.len()],
            stack: Vec::new(),
            next: 0,
            circles: Vec::new(),
        };
        for file in 0..self.files.len() {
            if search.number[file].is_none() {
                search.visit(file);
            }
        }
        let mut circles = search.circles;
        for circle in &mut circles {
            circle.sort_by_key(|file| &self.files[*file]);
        }
        circles.sort_by_key(|circle| (usize::MAX - circle.len(), circle.clone()));
        circles
    }

    /// Returns the files that a file imports.
    pub fn of(&self, file: usize) -> impl Iterator<Item = usize> {
        let arrows = self.arrows.range((file, 0)..(file + 1, 0));
        arrows.map(|((_, to), _)| *to)
    }
}

/// Tarjan's search.
struct Search<'a> {
    imports: &'a Imports,
    number: Vec<Option<usize>>,
    low: Vec<usize>,
    stack: Vec<usize>,
    next: usize,
    circles: Vec<Vec<usize>>,
}

impl Search<'_> {
    fn visit(&mut self, file: usize) {
        let number = self.next;
        self.next += 1;
        self.number[file] = Some(number);
        self.low[file] = number;
        self.stack.push(file);
        for to in self.imports.of(file).collect::<Vec<_>>() {
            match self.number[to] {
                None => {
                    self.visit(to);
                    self.low[file] = self.low[file].min(self.low[to]);
                }
                Some(seen) if self.stack.contains(&to) => {
                    self.low[file] = self.low[file].min(seen);
                }
                Some(_) => {}
            }
        }
        if self.low[file] == number {
            let start = self.stack.iter().position(|other| *other == file);
            let circle = self.stack.split_off(start.expect("it was pushed"));
            if circle.len() > 1 {
                self.circles.push(circle);
            }
        }
    }
}

/// Collects the paths in a module's items.
struct Reader<'a> {
    modules: &'a Modules,
    module: usize,
    /// Names of variables in the current function, which hide functions with the same name.
    bound: BTreeSet<String>,
    arrows: &'a mut BTreeMap<(usize, usize), BTreeSet<String>>,
}

impl Reader<'_> {
    fn path(&mut self, path: &[String]) {
        for (file, name) in self.modules.definitions(self.module, path) {
            self.arrow(file, name);
        }
    }

    fn arrow(&mut self, to: usize, name: String) {
        let from = self.modules.modules[self.module].file;
        if from != to {
            self.arrows.entry((from, to)).or_default().insert(name);
        }
    }

    /// Reads a function, beginning with the names of its variables.
    fn function(&mut self, bound: Bound, read: impl FnOnce(&mut Self)) {
        let before = self.bound.clone();
        self.bound.extend(bound.0);
        read(self);
        self.bound = before;
    }

    /// Reads the paths among the tokens of a macro. A single lower-case name may be a variable or a key, so it only
    /// counts if it is called, or is a value in an attribute.
    fn tokens(&mut self, tokens: TokenStream, is_attribute: bool) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        let mut before = None;
        while at < tokens.len() {
            match &tokens[at] {
                TokenTree::Group(group) => self.tokens(group.stream(), is_attribute),
                TokenTree::Ident(_) => {
                    let (path, len) = path_at(&tokens[at..]);
                    let after = tokens.get(at + len);
                    let is_called = matches!(after, Some(TokenTree::Group(group))
                        if group.delimiter() == Delimiter::Parenthesis);
                    let is_value = is_attribute && before == Some('=');
                    let is_lone = path.len() == 1 && starts_small(&path[0]);
                    let counts = !is_lone || (is_called && !is_attribute) || is_value;
                    if counts && before != Some('.') && !(is_lone && self.bound.contains(&path[0]))
                    {
                        self.path(&path);
                    }
                    if is_punct(after, '!')
                        && let Some(file) = self.modules.macro_definition(&path[0])
                    {
                        self.arrow(file, format!("{}!", path[0]));
                    }
                    at += len - 1;
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
            before = match &tokens[at] {
                TokenTree::Punct(punct) => Some(punct.as_char()),
                _ => None,
            };
            at += 1;
        }
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if !is_reexport(item) {
            for import in imports(item) {
                self.path(&import.path);
            }
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        if !is_test(&item.attrs) {
            self.function(Bound::of(|bound| bound.visit_item_fn(item)), |reader| {
                visit::visit_item_fn(reader, item);
            });
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        if !is_test(&item.attrs) {
            self.function(
                Bound::of(|bound| bound.visit_impl_item_fn(item)),
                |reader| {
                    visit::visit_impl_item_fn(reader, item);
                },
            );
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<String> = path
            .segments
            .iter()
            .map(|segment| segment.ident.to_string())
            .collect();
        let is_bound = segments.len() == 1 && self.bound.contains(&segments[0]);
        if path.leading_colon.is_none() && !is_bound {
            self.path(&segments);
        }
        visit::visit_path(self, path);
    }

    /// A constant in a pattern looks like a variable.
    fn visit_pat_ident(&mut self, pattern: &'ast PatIdent) {
        let name = pattern.ident.to_string();
        if !starts_small(&name) {
            self.path(&[name]);
        }
        visit::visit_pat_ident(self, pattern);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        if let Some(name) = call.path.get_ident()
            && let Some(file) = self.modules.macro_definition(&name.to_string())
        {
            self.arrow(file, format!("{name}!"));
        }
        self.tokens(call.tokens.clone(), false);
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta
            && !["cfg", "derive", "allow", "expect"]
                .iter()
                .any(|name| list.path.is_ident(name))
        {
            self.tokens(list.tokens.clone(), true);
        }
    }

    /// `pub(in crate::x)` is not an import.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
}

/// The names of variables.
struct Bound(BTreeSet<String>);

impl Bound {
    fn of(visit: impl FnOnce(&mut Self)) -> Self {
        let mut bound = Self(BTreeSet::new());
        visit(&mut bound);
        bound
    }
}

impl<'ast> Visit<'ast> for Bound {
    fn visit_pat_ident(&mut self, pattern: &'ast PatIdent) {
        let name = pattern.ident.to_string();
        if starts_small(&name) {
            self.0.insert(name);
        }
        visit::visit_pat_ident(self, pattern);
    }
}

/// Returns the path at the beginning of some tokens, and its number of tokens.
fn path_at(tokens: &[TokenTree]) -> (Vec<String>, usize) {
    let (mut path, mut len) = (Vec::new(), 0);
    while let Some(TokenTree::Ident(ident)) = tokens.get(len) {
        path.push(ident.to_string());
        len += 1;
        if !(is_punct(tokens.get(len), ':')
            && is_punct(tokens.get(len + 1), ':')
            && matches!(tokens.get(len + 2), Some(TokenTree::Ident(_))))
        {
            break;
        }
        len += 2;
    }
    (path, len)
}

fn is_punct(token: Option<&TokenTree>, character: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == character)
}

fn starts_small(name: &str) -> bool {
    name.starts_with(|first: char| first.is_lowercase() || first == '_')
}
