//! The assembler's text, cut into statements. This module changes nothing and refuses nothing.
//! Invalid text passes through, and the assembler reports it.
//!
//! The relevant syntax: statements end with a line or a semicolon. Comments run from `#` to the end
//! of the line or between `/*` and `*/`. Strings and characters hide all of these. Any number of
//! labels stand before a statement.

/// One statement: `text[start..end]`, without the labels before it and the blanks around it. It may
/// contain a comment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Statement {
    /// Offset of its first byte, after its labels.
    pub start: usize,
    /// Offset of the byte after its last.
    pub end: usize,
    /// True if a label stands before it.
    pub labelled: bool,
}

impl Statement {
    /// Returns the bytes of the statement.
    #[must_use]
    pub fn of<'a>(&self, text: &'a [u8]) -> &'a [u8] {
        &text[self.start..self.end]
    }

    /// Returns the statement for reading: in small letters, without comments, with single blanks,
    /// and with none in a register's name. The assembler ignores the case of mnemonics and
    /// registers.
    #[must_use]
    pub fn words(&self, text: &[u8]) -> String {
        let mut words = String::from_utf8_lossy(self.of(text)).to_ascii_lowercase();
        while let Some(start) = words.find("/*") {
            let end = words[start + 2..].find("*/").map_or(words.len(), |length| start + 2 + length + 2);
            words.replace_range(start..end, " ");
        }
        words.split_whitespace().collect::<Vec<_>>().join(" ").replace("% ", "%")
    }
}

/// Cuts a text into statements. A label without a statement after it is an empty statement.
pub fn statements(text: &[u8]) -> impl Iterator<Item = Statement> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < text.len() {
            let (end, next) = extent(text, at);
            let found = trimmed(text, at, end);
            at = next;
            if found.is_some() {
                return found;
            }
        }
        None
    })
}

/// Returns the end of the statement at `from`, and the start of the next. A comment to the end of
/// the line ends a statement.
fn extent(text: &[u8], from: usize) -> (usize, usize) {
    let mut at = from;
    while let Some(&byte) = text.get(at) {
        match byte {
            b'\n' | b';' => return (at, at + 1),
            b'#' => return (at, line_end(text, at)),
            b'/' if text.get(at + 1) == Some(&b'*') => at = comment_end(text, at + 2),
            b'"' => at = string_end(text, at + 1),
            b'\'' => at = character_end(text, at + 1),
            _ => at += 1,
        }
    }
    (text.len(), text.len())
}

fn line_end(text: &[u8], at: usize) -> usize {
    memchr(b'\n', &text[at..]).map_or(text.len(), |length| at + length)
}

fn comment_end(text: &[u8], at: usize) -> usize {
    text[at..].windows(2).position(|two| two == b"*/").map_or(text.len(), |length| at + length + 2)
}

fn string_end(text: &[u8], mut at: usize) -> usize {
    while let Some(&byte) = text.get(at) {
        match byte {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    text.len()
}

/// Returns the end of a character: `'a`, `'a'`, `'\n`. The end of a line is never a character.
fn character_end(text: &[u8], at: usize) -> usize {
    let length = match text.get(at) {
        Some(b'\n') | None => return at.min(text.len()),
        Some(b'\\') => 2,
        Some(_) => 1,
    };
    let end = (at + length).min(text.len());
    end + usize::from(text.get(end) == Some(&b'\''))
}

fn memchr(byte: u8, text: &[u8]) -> Option<usize> {
    text.iter().position(|other| *other == byte)
}

fn trimmed(text: &[u8], from: usize, to: usize) -> Option<Statement> {
    let blank = |byte: &u8| byte.is_ascii_whitespace();
    let skip = |mut at: usize| loop {
        at += text[at..to].iter().take_while(|byte| blank(byte)).count();
        match text[at..to].starts_with(b"/*") {
            true => at = comment_end(text, at + 2).min(to),
            false => return at,
        }
    };
    let mut start = skip(from);
    let mut labelled = false;
    while let Some(length) = label(&text[start..to]) {
        labelled = true;
        start = skip(start + length);
    }
    let end = to - text[start..to].iter().rev().take_while(|byte| blank(byte)).count();
    (labelled || end > start).then_some(Statement { start, end: end.max(start), labelled })
}

/// Returns the length of a label with its colon: a name, a number, a quoted name, or a name that a
/// macro makes.
fn label(text: &[u8]) -> Option<usize> {
    let name = match text.first()? {
        b'"' => string_end(text, 1),
        _ => text.iter().take_while(|byte| is_symbol(**byte)).count(),
    };
    (name > 0 && text.get(name) == Some(&b':')).then_some(name + 1)
}

fn is_symbol(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_.$\\@()?".contains(&byte) || byte >= 0x80
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut(text: &str) -> Vec<(bool, &str)> {
        let text = text.as_bytes();
        statements(text).map(|one| (one.labelled, std::str::from_utf8(one.of(text)).unwrap())).collect()
    }

    #[test]
    fn statements_are_cut_where_the_assembler_cuts_them() {
        assert_eq!(cut("cli;sti\n\thlt # cli; x\n"), [(false, "cli"), (false, "sti"), (false, "hlt")]);
        assert_eq!(cut("1: foo: \"b r\": rdmsr\n2:\n"), [(true, "rdmsr"), (true, "")]);
        assert_eq!(cut(".ascii \"a;#\\\"cli\"; cli"), [(false, ".ascii \"a;#\\\"cli\""), (false, "cli")]);
        assert_eq!(cut("/* cli;\n sti */ hlt"), [(false, "hlt")]);
        assert_eq!(cut("in /* a; */ %dx, %al"), [(false, "in /* a; */ %dx, %al")]);
        assert_eq!(cut("cmp $';, %al; cmp $'#', %al"), [(false, "cmp $';, %al"), (false, "cmp $'#', %al")]);
        assert_eq!(cut("\\name\\(): .Lx\\@: cli"), [(true, "cli")]);
        assert_eq!(cut("#APP\n# 12 \"a.h\" 1\n cli\n#NO_APP"), [(false, "cli")]);
    }

    #[test]
    fn parsing_ends_on_invalid_assembly() {
        for text in ["\"", "'", "'\\", "/*", "\"\\", ":", "1:", "::", "'\n"] {
            let _ = cut(text);
        }
    }

    proptest! {
        #[test]
        fn statements_lie_in_the_text_in_order(text: Vec<u8>) {
            let mut before = 0;
            for one in statements(&text) {
                prop_assert!(before <= one.start && one.start <= one.end && one.end <= text.len());
                before = one.end;
            }
        }
    }
}
