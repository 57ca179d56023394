//! Text of other machines for this one's terminal.

/// Returns a text without control characters, which a terminal might obey. Lines stay.
#[must_use]
pub fn plain(text: &str) -> String {
    text.chars().filter(|one| *one == '\n' || !one.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_nothing_to_obey() {
        assert_eq!(plain("Grüße\n\u{1b}]0;x\u{7}\r\u{9b}2J"), "Grüße\n]0;x2J");
    }
}
