//! The sizes of files, functions and structs, without tests.

use std::path::Path;
use std::{fmt, fs};

use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Block, Fields, Ident, ImplItemFn, ItemFn, ItemImpl, ItemMod, ItemStruct, ItemTrait};
use syn::{Signature, TraitItemFn, Type};

use crate::modules::is_test;

const MOST_LINES_OF_FILE: usize = 500;
const MOST_LINES_OF_FUNCTION: usize = 80;
const MOST_FIELDS: usize = 12;

/// An item that exceeds the size limits of this project.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TooLarge {
    /// `file`, `function` or `struct`.
    pub kind: String,
    /// The file's path from the root of the repository, followed by a space and the item's name for an item in it.
    pub place: String,
    /// The item's size. It is empty in a list of exceptions.
    pub size: String,
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} `{}` {}", self.kind, self.place, self.size)
    }
}

/// Measures a file. `path` is relative to the root of the repository.
pub fn too_large(root: &Path, path: &str) -> Vec<TooLarge> {
    let text = fs::read_to_string(root.join(path)).expect("sources can be read");
    let syntax = syn::parse_file(&text).expect("sources are Rust");
    let mut ruler = Ruler {
        path,
        owner: None,
        num_test_lines: 0,
        found: Vec::new(),
    };
    ruler.visit_file(&syntax);
    let lines = text.lines().count() - ruler.num_test_lines;
    ruler.measure("file", None, lines, MOST_LINES_OF_FILE, "lines");
    ruler.found
}

struct Ruler<'a> {
    path: &'a str,
    /// The type or trait whose functions are being measured.
    owner: Option<String>,
    num_test_lines: usize,
    found: Vec<TooLarge>,
}

impl Ruler<'_> {
    fn measure(&mut self, kind: &str, name: Option<String>, size: usize, most: usize, of: &str) {
        if size > most {
            let name = name.map(|name| format!(" {name}"));
            self.found.push(TooLarge {
                kind: kind.to_owned(),
                place: format!("{}{}", self.path, name.unwrap_or_default()),
                size: format!("has {size} {of}, but at most {most} are allowed"),
            });
        }
    }

    fn function(&mut self, signature: &Signature, block: &Block) {
        let lines = num_lines(signature.span(), block.span());
        let name = self.named(&signature.ident);
        self.measure(
            "function",
            Some(name),
            lines,
            MOST_LINES_OF_FUNCTION,
            "lines",
        );
    }

    fn named(&self, name: &Ident) -> String {
        let owner = self.owner.as_ref().map(|owner| format!("{owner}::"));
        format!("{}{name}", owner.unwrap_or_default())
    }

    fn inside(&mut self, owner: Option<String>, visit: impl FnOnce(&mut Self)) {
        let before = std::mem::replace(&mut self.owner, owner);
        visit(self);
        self.owner = before;
    }
}

impl<'ast> Visit<'ast> for Ruler<'_> {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        } else if item.content.is_some() {
            self.num_test_lines += num_lines(item.span(), item.span());
        }
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        let owner = match item.self_ty.as_ref() {
            Type::Path(path) => path.path.segments.last().map(|last| last.ident.to_string()),
            _ => None,
        };
        self.inside(owner, |ruler| visit::visit_item_impl(ruler, item));
    }

    fn visit_item_trait(&mut self, item: &'ast ItemTrait) {
        let owner = Some(item.ident.to_string());
        self.inside(owner, |ruler| visit::visit_item_trait(ruler, item));
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        if !is_test(&item.attrs) {
            self.function(&item.sig, &item.block);
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        self.function(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast TraitItemFn) {
        if let Some(block) = &item.default {
            self.function(&item.sig, block);
        }
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        if let Fields::Named(fields) = &item.fields {
            let name = Some(item.ident.to_string());
            self.measure("struct", name, fields.named.len(), MOST_FIELDS, "fields");
        }
    }
}

/// Returns the number of lines from the first line of one span to the last line of another.
fn num_lines(first: Span, last: Span) -> usize {
    last.end().line - first.start().line + 1
}
