//! Patterns of dotted paths.

use std::fmt;

/// A set of dotted paths: the pattern language for units, placements and everything else that is selected by path.
///
/// | in a pattern | matches |
/// |---|---|
/// | `*` as a whole name | exactly one name |
/// | `*` in a name, such as `conv*` | any characters of that name, possibly none |
/// | `**` | any number of names, possibly none |
/// | anything else | itself |
///
/// ```
/// use burn_fsdp_mesh::Pattern;
///
/// assert!(Pattern::new("blocks.*.fc.weight").matches("blocks.3.fc.weight"));
/// assert!(Pattern::new("conv*").matches("conv2"));
/// assert!(Pattern::new("**.weight").matches("blocks.3.fc.weight"));
/// assert!(!Pattern::new("blocks.*").matches("blocks.3.fc"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pattern(String);

impl Pattern {
    /// Creates the set of paths that `pattern` matches.
    pub fn new(pattern: impl Into<String>) -> Self {
        Self(pattern.into())
    }

    /// Returns the original pattern.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns true if the pattern matches the whole path.
    pub fn matches(&self, path: &str) -> bool {
        let (wanted, found) = (names(&self.0), names(path));
        matches_names(&wanted, &found)
    }

    /// Returns the longest prefix of the path, up to the end of a name, that the pattern matches. For a parameter's
    /// path, this may be the module that contains it.
    ///
    /// ```
    /// use burn_fsdp_mesh::Pattern;
    ///
    /// let blocks = Pattern::new("**.blocks.*");
    /// assert_eq!(blocks.prefix_of("net.blocks.3.fc.weight"), Some("net.blocks.3"));
    /// assert_eq!(blocks.prefix_of("net.head.weight"), None);
    /// ```
    pub fn prefix_of<'a>(&self, path: &'a str) -> Option<&'a str> {
        let ends = path.match_indices('.').map(|(end, _)| end);
        let mut prefixes = ends.chain([path.len()]).map(|end| &path[..end]);
        prefixes.rfind(|prefix| self.matches(prefix))
    }

    /// Returns the innermost module that the pattern matches and that contains the parameter at `path`.
    pub fn module_of<'a>(&self, path: &'a str) -> Option<&'a str> {
        let (module, _) = path.rsplit_once('.')?;
        self.prefix_of(module)
    }

    /// Returns true if the pattern matches a module that contains the parameter at `path`.
    pub fn is_around(&self, path: &str) -> bool {
        self.module_of(path).is_some()
    }
}

impl From<&str> for Pattern {
    fn from(pattern: &str) -> Self {
        Self::new(pattern)
    }
}

impl From<String> for Pattern {
    fn from(pattern: String) -> Self {
        Self::new(pattern)
    }
}

/// Prints the original pattern.
impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn names(path: &str) -> Vec<&str> {
    path.split('.').collect()
}

/// Returns true if the names of the pattern match the names of the path.
///
/// `fits[n]` is true if the names of the pattern so far match the first `n` names of the path. There is one row per
/// name of the pattern, so the time is bounded by the product of both lengths, however many stars there are.
fn matches_names(pattern: &[&str], path: &[&str]) -> bool {
    let mut fits: Vec<bool> = (0..=path.len()).map(|count| count == 0).collect();
    for wanted in pattern {
        let mut next = vec![false; path.len() + 1];
        match *wanted {
            "**" => {
                let first = fits.iter().position(|fits| *fits);
                if let Some(first) = first {
                    next[first..].fill(true);
                }
            }
            wanted => {
                for (count, found) in path.iter().enumerate() {
                    next[count + 1] = fits[count] && matches_name(wanted, found);
                }
            }
        }
        fits = next;
    }
    fits[path.len()]
}

/// Returns true if a pattern of one name matches `name`. The pieces between stars must occur in order, the first at
/// the beginning and the last at the end.
fn matches_name(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut name) = name.strip_prefix(first) else {
        return false;
    };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    let Some(before_last) = name.strip_suffix(last) else {
        return false;
    };
    name = before_last;
    for piece in middle.split('*') {
        // The leftmost occurrence leaves the most text for the pieces after it.
        let Some(at) = name.find(piece) else {
            return false;
        };
        name = &name[at + piece.len()..];
    }
    true
}

#[cfg(test)]
mod tests {
    use super::Pattern;

    fn matches(pattern: &str, path: &str) -> bool {
        Pattern::new(pattern).matches(path)
    }

    #[test]
    fn a_star_matches_one_segment() {
        assert!(matches("blocks.*.fc.weight", "blocks.3.fc.weight"));
        assert!(!matches("blocks.*.weight", "blocks.3.fc.weight"));
        assert!(matches("blocks.*", "blocks.11"));
        assert!(!matches("*", "a.b"));
        assert!(!matches("blocks.*", "blocks"));
        assert!(matches("", ""));
    }

    #[test]
    fn patterns_find_the_module_of_a_parameter() {
        let module_of =
            |pattern: &str, path| Pattern::new(pattern).module_of(path).map(str::to_owned);
        assert_eq!(
            module_of("**.norm", "blocks.3.norm.gamma").as_deref(),
            Some("blocks.3.norm")
        );
        assert_eq!(
            module_of("blocks.*", "blocks.3.fc.weight").as_deref(),
            Some("blocks.3")
        );
        assert_eq!(module_of("**.gamma", "blocks.3.norm.gamma"), None);
        assert!(Pattern::new("**").is_around("norm.gamma"));
        assert!(!Pattern::new("**").is_around("gamma"));
    }

    #[test]
    fn two_stars_match_any_number_of_segments() {
        assert!(matches("blocks.**.weight", "blocks.3.fc.weight"));
        assert!(matches("**", "batch"));
        assert!(matches("**", ""));
        assert!(matches("**.weight", "weight"));
        assert!(matches("**.a.**.b", "x.a.a.y.b.b"));
        assert!(!matches("**.a.**.b", "x.b.a"));
        assert!(matches("a.**", "a"));
    }

    #[test]
    fn a_star_in_a_segment_matches_any_characters() {
        assert!(matches("conv*", "conv"));
        assert!(matches("conv*", "conv12"));
        assert!(!matches("conv*", "conv1.weight"));
        assert!(matches("conv*.weight", "conv1.weight"));
        assert!(matches("*norm*", "norm"));
        assert!(matches("*norm*", "layer_norm_2"));
        assert!(matches("a*b*c", "axbxbc"));
        assert!(!matches("a*b*c", "acb"));
        // Prefix and suffix do not share characters.
        assert!(!matches("ab*ba", "aba"));
        assert!(matches("ab*ba", "abba"));
    }

    #[test]
    fn the_longest_prefix_wins() {
        let prefix = |pattern: &str, path| Pattern::new(pattern).prefix_of(path);
        assert_eq!(prefix("blocks.*", "blocks.3.fc.weight"), Some("blocks.3"));
        assert_eq!(prefix("**", "a.b.c"), Some("a.b.c"));
        assert_eq!(prefix("a.*.c", "a.b"), None);
    }

    #[test]
    fn many_stars_take_little_time() {
        let pattern = "**.".repeat(40) + "z";
        let path = "a.".repeat(200) + "b";
        assert!(!matches(&pattern, &path));
        let name = "*a".repeat(30) + "z";
        assert!(!matches(&name, &"a".repeat(500)));
    }
}
