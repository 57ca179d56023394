//! The command line to type if a command needs root.

use std::{env, ffi::OsString};

/// Returns the typed command line, after `sudo`.
#[must_use]
pub fn again() -> String {
    before(env::args_os().skip(1))
}

/// Quotes the words after `sudo mercury`. Leaves a pairing token out: a user who sees it may
/// receive the machine.
fn before(words: impl Iterator<Item = OsString>) -> String {
    let mut line = "sudo mercury".to_owned();
    let mut is_key = false;
    for word in words {
        let word = word.to_string_lossy();
        line.push(' ');
        match word.strip_prefix("--key=") {
            Some(_) => line.push_str("--key=…"),
            None if is_key && word != "-" => line.push('…'),
            None => line.push_str(&quoted(&word)),
        }
        is_key = word == "--key";
    }
    line
}

/// Quotes a word so that a shell takes it as one.
fn quoted(word: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "_@%+=:,./-".contains(letter);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sudo_line_repeats_the_typed_words() {
        let line = |words: &[&str]| before(words.iter().map(OsString::from));
        assert_eq!(line(&["attach"]), "sudo mercury attach");
        assert_eq!(
            line(&["migrate", "10.9.0.3", "--streams=4"]),
            "sudo mercury migrate 10.9.0.3 --streams=4"
        );
        assert_eq!(line(&["checkpoint", "my disk/it's"]), r"sudo mercury checkpoint 'my disk/it'\''s'");
        assert_eq!(line(&["log", ""]), "sudo mercury log ''");
    }

    #[test]
    fn a_key_is_not_shown_again() {
        let line = |words: &[&str]| before(words.iter().map(OsString::from));
        assert_eq!(line(&["migrate", "a", "--key", "secret", "-v"]), "sudo mercury migrate a --key … -v");
        assert_eq!(line(&["migrate", "a", "--key=secret"]), "sudo mercury migrate a --key=…");
        assert_eq!(line(&["migrate", "a", "--key", "-"]), "sudo mercury migrate a --key -");
    }
}
