//! How often the workspace's prose uses constructions that are not idiomatic English.
//!
//! Prose is Markdown files, and comments that fill a line of Rust. Frequencies are per 10,000 words. In five other Rust
//! codebases (ripgrep, rayon, Burn, tokenizers, candle) all of them are below these limits.

use std::fmt;
use std::fs;
use std::path::Path;

use regex::Regex;

/// A construction: its name, a pattern, continuations that make a match idiomatic, and the largest allowed frequency.
type Rule = (&'static str, &'static str, &'static [&'static str], f64);

const RULES: [Rule; 11] = [
    ("that of", r"\b(that|those) of\b", &[], 3.0),
    ("of which", r"\bof (which|what|whom|whose)\b", &[], 2.0),
    ("say", r"\b(says?|said)\b", &[], 4.0),
    ("so that", r"\bso that\b", &[], 6.0),
    ("beside", r"\bbeside\b", &[], 1.0),
    ("alone", r"\balone\b", &[], 2.0),
    ("go on", r"\b(go|goes|going) on\b", &[], 1.0),
    ("lies", r"\b(lies|lie)\b", &[], 1.0),
    (", too", r", too\b", &[], 1.0),
    ("has not", r"\b(has|have) not\b", &[" been", " yet"], 2.0),
    (
        "clause subject",
        r"(?m)(?:^|[.;:] )(What|Whoever|Where|Who|Whichever) [a-z]+ [^.?]{0,60}\b(is|are|has|have|was|were|goes|stays|comes|does)\b",
        &[],
        1.5,
    ),
];

/// The number of words, and the number of uses of each construction.
#[derive(Clone, Debug)]
pub struct Prose {
    num_words: usize,
    num_uses: [usize; RULES.len()],
}

impl Prose {
    /// Counts in all Markdown and Rust files of a folder. Hidden folders other than `.ci` and `.github` are skipped, and
    /// so are build folders (`target`).
    pub fn read(root: &Path) -> Self {
        let mut texts = Vec::new();
        collect(root, &compiled(r"(?m)^\s*//[/!]?\s?(.*)$"), &mut texts);
        let num_words = texts.iter().map(|text| text.split_whitespace().count());
        Self {
            num_words: num_words.sum(),
            num_uses: RULES.map(|(_, pattern, idiomatic, _)| {
                let pattern = compiled(pattern);
                let uses = texts.iter().map(|text| num_uses(&pattern, idiomatic, text));
                uses.sum()
            }),
        }
    }

    /// Returns the constructions whose frequency exceeds its limit.
    pub fn excesses(&self) -> Vec<&'static str> {
        let rules = RULES.iter().zip(self.num_uses);
        let over = rules.filter(|((_, _, _, limit), uses)| self.frequency(*uses) > *limit);
        over.map(|((name, ..), _)| *name).collect()
    }

    fn frequency(&self, num_uses: usize) -> f64 {
        num_uses as f64 * 1e4 / self.num_words.max(1) as f64
    }
}

/// A table of all frequencies and limits.
impl fmt::Display for Prose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ((name, _, _, limit), uses) in RULES.iter().zip(self.num_uses) {
            writeln!(f, "{name}: {:.1} (at most {limit})", self.frequency(uses))?;
        }
        let excesses = match self.excesses() {
            excesses if excesses.is_empty() => "none".to_owned(),
            excesses => excesses.join(", "),
        };
        write!(f, "{} words; over the limit: {excesses}", self.num_words)
    }
}

fn collect(folder: &Path, comment: &Regex, texts: &mut Vec<String>) {
    let entries =
        fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for entry in entries {
        let entry = entry.expect("a folder can be listed");
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_hidden = name.starts_with('.') && name != ".ci" && name != ".github";
        if entry.file_type().expect("it has a type").is_dir() {
            if name != "target" && !is_hidden {
                collect(&path, comment, texts);
            }
        } else if name.ends_with(".md") {
            texts.push(read(&path));
        } else if name.ends_with(".rs") {
            let text = read(&path);
            let comments = comment
                .captures_iter(&text)
                .map(|found| found[1].to_owned());
            texts.push(comments.collect::<Vec<_>>().join("\n"));
        }
    }
}

/// Counts matches that none of the `idiomatic` continuations follows.
fn num_uses(pattern: &Regex, idiomatic: &[&str], text: &str) -> usize {
    let matches = pattern.find_iter(text).filter(|found| {
        let rest = &text[found.end()..];
        !idiomatic.iter().any(|next| rest.starts_with(next))
    });
    matches.count()
}

fn compiled(pattern: &str) -> Regex {
    Regex::new(pattern).expect("the pattern is valid")
}

fn read(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    String::from_utf8_lossy(&bytes).replace("\r\n", "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_comments_and_markdown() {
        let folder = std::env::temp_dir().join(format!("burn-fsdp-prose-{}", std::process::id()));
        for skipped in ["target", ".git", "inside"] {
            fs::create_dir_all(folder.join(skipped)).expect("a folder is made");
        }
        let write = |name: &str, text: &str| {
            fs::write(folder.join(name), text).expect("a file is written");
        };
        write("target/a.md", "so that");
        write(".git/a.md", "so that");
        write(
            "inside/a.rs",
            "    /// It has not been. It has not.\nlet x = 1; // so that\n// What it does is this\n",
        );
        write("a.md", "the size\nof it, so that, too");
        let prose = Prose::read(&folder);
        fs::remove_dir_all(&folder).expect("the folder is removed");

        assert_eq!(prose.num_words, 19);
        assert_eq!(prose.num_uses, [0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1]);
        assert_eq!(
            prose.excesses(),
            ["so that", ", too", "has not", "clause subject"]
        );
    }
}
