//! The CPU backend's answers: equal to those of transformers, and the same to the last bit
//! however the work is cut.

mod decoder {
    mod fixture;
    mod invariance;
    mod parity;
    mod quantised;
    mod refusals;
    mod run;
}
