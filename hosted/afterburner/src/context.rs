//! The context of a text: its section, and the processor's mode. The prelude's macros cannot know
//! either, so the rewriter tells them.
//!
//! The mode belongs to the assembler and holds for all sections. The verifier reads each section by
//! itself. A text that returns to a section which was left in another mode therefore gets a new
//! record of its mode.

use std::collections::HashMap;

use crate::{rewrite::Treatment, section::Sections};

const LONG_MODE: u8 = 64;

/// The context at a place of a text, updated directive by directive.
#[derive(Debug)]
pub struct Context {
    sections: Sections,
    treatment: Treatment,
    /// Bits of the mode: 16, 32 or 64.
    bits: u8,
    /// Bits that were recorded for a section, where a record was necessary.
    written: HashMap<usize, u8>,
    /// State that the prelude was told.
    told: PreludeState,
    /// Depth of nested macro definitions, and the section in which the outermost was found.
    macros: (usize, usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PreludeState {
    replacement: bool,
    left: bool,
}

impl Context {
    /// Returns the context at the beginning of a text.
    #[must_use]
    pub fn new(treatment: Treatment) -> Self {
        Self {
            sections: Sections::default(),
            treatment,
            bits: LONG_MODE,
            written: HashMap::new(),
            told: PreludeState { replacement: false, left: treatment == Treatment::Left },
            macros: (0, 0),
        }
    }

    /// Follows a directive. Returns the text to insert after it.
    pub fn follow(&mut self, name: &str, rest: &str) -> Option<String> {
        match name {
            ".macro" => {
                let section = if self.macros.0 == 0 { self.sections.current().number } else { self.macros.1 };
                self.macros = (self.macros.0 + 1, section);
            }
            ".endm" | ".endmacro" => self.macros.0 = self.macros.0.saturating_sub(1),
            _ => {}
        }
        match mode(name) {
            Some(bits) => self.bits = bits,
            None if self.sections.follow(name, rest) => {}
            None => return None,
        }
        let mut said = String::new();
        if self.sections.current().is_code {
            said += &self.write_mode();
        }
        said += &self.tell(false);
        (!said.is_empty()).then_some(said)
    }

    /// Returns the text to insert before a statement that is an instruction or makes some. Data
    /// gets no such text before its first instruction.
    pub fn before_instruction(&mut self) -> Option<String> {
        if !self.is_in_data() {
            return None;
        }
        let said = self.write_mode() + &self.tell(true);
        (!said.is_empty()).then(|| format!("{} ; ", said.trim_start_matches(" ; ")))
    }

    /// Returns the text to insert at the end: the linker appends code that begins in 64-bit mode.
    #[must_use]
    pub fn end(&self) -> Option<String> {
        let mut open: Vec<&str> = Vec::new();
        for (number, _) in self.written.iter().filter(|(_, bits)| **bits != LONG_MODE) {
            open.push(self.sections.name(*number));
        }
        open.sort_unstable();
        let close = |name| format!("\n.pushsection {name}\n mercury_mode {LONG_MODE}\n.popsection\n");
        (!open.is_empty()).then(|| open.into_iter().map(close).collect())
    }

    /// Returns true if instructions stay as they are here: those of other modes, and those among
    /// data, which are there to be copied.
    #[must_use]
    pub fn is_left(&self) -> bool {
        self.treatment == Treatment::Left || self.bits != LONG_MODE || self.is_in_data()
    }

    /// Returns true if the current section holds instructions.
    #[must_use]
    pub fn is_code(&self) -> bool {
        self.sections.current().is_code
    }

    /// Returns true if the current section holds replacements of alternatives.
    #[must_use]
    pub fn is_replacement(&self) -> bool {
        self.sections.current().is_replacement
    }

    /// Returns true if instructions here lie among data. A macro's body does not lie where it is
    /// defined.
    fn is_in_data(&self) -> bool {
        let current = self.sections.current();
        !current.is_code && (self.macros.0 == 0 || self.macros.1 != current.number)
    }

    fn write_mode(&mut self) -> String {
        let written = self.written.get(&self.sections.current().number).copied().unwrap_or(LONG_MODE);
        if written == self.bits {
            return String::new();
        }
        self.written.insert(self.sections.current().number, self.bits);
        format!(" ; mercury_mode {}", self.bits)
    }

    fn tell(&mut self, in_data: bool) -> String {
        let left = self.treatment == Treatment::Left || self.bits != LONG_MODE || in_data;
        let now = PreludeState { replacement: self.is_replacement(), left };
        let mut said = String::new();
        if now.replacement != self.told.replacement {
            said += &format!(" ; .set .Lmercury_alternative, {}", u8::from(now.replacement));
        }
        if now.left != self.told.left {
            said += &format!(" ; .set .Lmercury_left, {}", u8::from(now.left));
        }
        self.told = now;
        said
    }
}

/// Returns the bits of the mode to which a directive switches.
fn mode(name: &str) -> Option<u8> {
    match name {
        ".code64" => Some(LONG_MODE),
        ".code32" => Some(32),
        ".code16" | ".code16gcc" => Some(16),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_prelude_is_told_of_replacements() {
        let mut context = Context::new(Treatment::Slots);
        let enter = context.follow(".pushsection", ".altinstr_replacement,\"ax\"");
        assert!(enter.unwrap().ends_with("mercury_alternative, 1"));
        assert_eq!(context.follow(".section", ".altinstr_replacement,\"ax\""), None);
        assert!(context.follow(".popsection", "").unwrap().ends_with("mercury_alternative, 0"));
    }

    #[test]
    fn a_mode_is_written_down_in_each_section_and_taken_back_in_each() {
        let mut context = Context::new(Treatment::Slots);
        assert!(context.follow(".code32", "").unwrap().starts_with(" ; mercury_mode 32"));
        assert_eq!(context.follow(".section", ".head.text,\"ax\"").unwrap(), " ; mercury_mode 32");
        assert!(context.is_left());
        assert!(context.follow(".code64", "").unwrap().starts_with(" ; mercury_mode 64"));
        assert!(!context.is_left());
        let end = context.end().unwrap();
        assert!(end.contains(".pushsection .text\n mercury_mode 64") && !end.contains("head"), "{end}");
        assert_eq!(context.follow(".text", "").unwrap(), " ; mercury_mode 64");
        assert_eq!(context.end(), None);
    }

    #[test]
    fn code_left_alone_stays_so_in_all_modes() {
        let mut context = Context::new(Treatment::Left);
        for directive in [".code32", ".code64"] {
            assert!(!context.follow(directive, "").unwrap().contains("left"), "{directive}");
            assert!(context.is_left());
        }
    }

    #[test]
    fn instructions_among_data_are_left_but_not_a_macros() {
        let mut context = Context::new(Treatment::Slots);
        assert_eq!(context.before_instruction(), None);
        assert_eq!(context.follow(".section", ".rodata"), None);
        assert_eq!(context.follow(".macro", "m"), None);
        assert_eq!((context.before_instruction(), context.is_left()), (None, false));
        assert_eq!(context.follow(".pushsection", ".data"), None);
        assert!(context.is_left());
        assert_eq!(context.follow(".popsection", ""), None);
        assert_eq!(context.follow(".endm", ""), None);
        assert_eq!(context.before_instruction().unwrap(), ".set .Lmercury_left, 1 ; ");
        assert_eq!(context.before_instruction(), None);
        assert_eq!(context.follow(".text", "").unwrap(), " ; .set .Lmercury_left, 0");
    }
}
