//! The commands that the pages of docs/ tell a reader to type, for tests that type them.

use std::fs;

use crate::{
    error::{Context, Error, Result},
    paths,
};

/// The indentation of a line to type.
const INDENT: &str = "    ";

/// Returns the blocks of commands in a section of a page. The section begins at the line `heading` and ends
/// at the next heading. Comments are left out, and a line that goes on in the next one is one command.
///
/// # Errors
/// If there is no such page or section, or it has no commands.
pub fn commands(page: &str, heading: &str) -> Result<Vec<Vec<String>>> {
    let path = paths::root().join("docs").join(page);
    let text = fs::read_to_string(&path).context(|| format!("read {}", path.display()))?;
    let blocks = blocks(&text, heading);
    if blocks.is_empty() {
        return Err(Error::Host(format!("{page} has no commands below `{heading}`")));
    }
    Ok(blocks)
}

/// Returns the block of [`commands`] that has a command with this beginning.
///
/// # Errors
/// If there is none.
pub fn block(page: &str, heading: &str, beginning: &str) -> Result<Vec<String>> {
    let has_it = |block: &Vec<String>| block.iter().any(|line| line.starts_with(beginning));
    let found = commands(page, heading)?.into_iter().find(has_it);
    found.ok_or_else(|| Error::Host(format!("{page} has no `{beginning}` below `{heading}`")))
}

fn blocks(text: &str, heading: &str) -> Vec<Vec<String>> {
    let text = text.replace("\\\n", " ");
    let lines = text.lines().skip_while(|line| *line != heading).skip(1);
    let mut blocks = vec![Vec::new()];
    for line in lines.take_while(|line| !line.starts_with('#')) {
        match line.strip_prefix(INDENT) {
            Some(line) => blocks.last_mut().into_iter().for_each(|block| block.push(without_comment(line))),
            None => blocks.push(Vec::new()),
        }
    }
    blocks.retain(|block| !block.is_empty());
    blocks
}

/// Cuts a comment off, and indentation in the midst of a command.
fn without_comment(line: &str) -> String {
    let mut quoted = false;
    let comment = line.char_indices().find(|(at, character)| {
        quoted ^= *character == '\'';
        !quoted && *character == '#' && line[..*at].ends_with(' ')
    });
    let command = comment.map_or(line, |(at, _)| &line[..at]);
    command.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found_by_their_section() {
        let before = "# A\n\n    before\n\n# B\n\nText.\n\n    one  # why\n    two 'a # b'\n\n";
        let text = &format!("{before}    three \\\n        --four # why\n# C\n    after\n");
        assert_eq!(blocks(text, "# B"), [vec!["one", "two 'a # b'"], vec!["three --four"]]);
        assert!(blocks(text, "# D").is_empty());
    }
}
