//! Words that comments should not contain.

use std::fs;
use std::path::Path;

/// Words that begin a clause. A doc comment should begin with a statement instead.
const CLAUSES: [&str; 4] = ["What", "Whether", "How", "Where"];

/// Counts doc comments that begin with a clause.
pub fn num_clauses(file: &Path) -> usize {
    let mut num_clauses = 0;
    let mut was_comment = false;
    for line in read(file).lines() {
        let comment = line.trim_start().strip_prefix("///");
        let comment = comment.or_else(|| line.trim_start().strip_prefix("//!"));
        let first = comment.and_then(|comment| comment.split_whitespace().next());
        let is_clause = first.is_some_and(|first| CLAUSES.contains(&first));
        num_clauses += usize::from(is_clause && !was_comment);
        was_comment = comment.is_some();
    }
    num_clauses
}

/// Returns the lines of comments that contain a phrase as whole words.
pub fn lines_with(file: &Path, phrase: &str) -> Vec<usize> {
    let text = read(file);
    let lines = text.lines().enumerate();
    let with = lines.filter(|(_, line)| {
        let comment = line.find("//").map_or("", |at| &line[at..]).to_lowercase();
        comment.match_indices(phrase).any(|(at, _)| {
            let is_letter = |letter: Option<char>| {
                letter.is_some_and(|letter| letter.is_alphanumeric() || letter == '_')
            };
            let before = comment[..at].chars().next_back();
            let after = comment[at + phrase.len()..].chars().next();
            let is_number = comment[at..].starts_with("floating point")
                || comment[at..].starts_with("floating-point");
            !is_letter(before) && !is_letter(after) && !is_number
        })
    });
    with.map(|(at, _)| at + 1).collect()
}

fn read(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}
