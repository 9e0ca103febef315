"""Which reported faults concern these ops, what is right, and which ones don't concern them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CASES", "ELSEWHERE", "ROWS", "Row"]


class Row(NamedTuple):
    """A reported kind of fault.

    Attributes:
        runs: Where it has to be tried: C and S on a CPU, T in Triton's interpreter, G on a GPU.
        right: What has to be, instead.
    """

    runs: str
    right: str


ROWS = {
    "N1": Row("SG", "a fused norm serves rows of 3584, which no wide vector divides by threads"),
    "N2": Row("SG", "a fused norm serves rows of 16384, or refuses them"),
    "N3": Row("SG", "the stride of a dimension of one row means nothing"),
    "N5": Row("SG", "a fused norm finds rows beyond 2^31 elements"),
    "N6": Row("CS", "a residual of another width is refused"),
    "N7": Row("S", "a norm with a residual rounds by the same policy as one without"),
    "N9": Row("SG", "a fused norm is the norm of the sum that it stores"),
    "N10": Row("SG", "a row of odd width leaves the next one's first column alone"),
    "N11": Row("SG", "results are rounded to the nearest, so that errors have no sign"),
    "N13": Row("C", "eps is what was given, not one of the dtype"),
    "N14": Row("C", "one plus a large weight is added in float32"),
    "N15": Row("C", "one plus a small weight is added in float32"),
    "N17": Row("TS", "a last stride of more than one is read as such"),
    "N18": Row("SG", "an expanded gradient is read as one that isn't"),
    "N19": Row("TS", "all pairs of layouts give what contiguous tensors give, or are refused"),
    "N21": Row("TS", "a gradient with a second consumer isn't overwritten"),
    "N23": Row("G", "a row is right among any number of rows, bit for bit where that is declared"),
    "N25": Row("T", "the variance counts no padding"),
    "N26": Row("C", "the variance of large equal numbers isn't negative"),
    "N27": Row("C", "a constant row gives the bias"),
    "N29": Row("C", "a small variance beside a large mean isn't lost"),
    "N30": Row("C", "a variance that overflows gives no NaN"),
    "N31": Row("CG", "a mean that overflows gives the bias or NaN, and no other row changes"),
    "N33": Row("G", "a norm and a reciprocal in one compiled graph are those of eager code"),
    "N34": Row("S", "a zero row with a tiny eps is zero"),
    "N35": Row("C", "eps isn't scaled by the largest element"),
    "A1": Row("SG", "no tokens give no results, and the next call runs"),
    "A2": Row("G", "gates find wide rows beyond 2^31 elements"),
    "A3": Row("TG", "gates find many rows beyond 2^31 elements"),
    "A5": Row("C", "a large gate passes its value through"),
    "A6": Row("C", "the tail of gelu is within an absolute bound"),
    "A7": Row("SG", "no tokens launch nothing"),
    "R1": Row("SG", "positions of 32 and 64 bits give the same bits"),
    "R2": Row("S", "a cache in float16 is refused"),
    "R3": Row("C", "a cache in bfloat16 is refused"),
    "R5": Row("S", "what isn't rotated is copied"),
    "R6": Row("S", "what isn't rotated is copied, for interleaved pairs too"),
    "R7": Row("SG", "a quarter of a head can be rotated"),
    "R9": Row("C", "pairs are those of the rotated part"),
    "R10": Row("C", "positions are integers"),
    "R11": Row("C", "angles are those of float32"),
    "R13": Row("S", "tokens of a batch turn by their own positions"),
    "T1": Row("CT", "two empty states merge to an empty one"),
    "T2": Row("CT", "a state is empty at either sign of infinity"),
    "T3": Row("SG", "an empty state has no weight"),
    "T5": Row("SG", "causal queries before the first key have no keys"),
    "T6": Row("SG", "outputs of queries without keys are written"),
    "T7": Row("S", "no keys give zeros and an LSE of -inf"),
    "T9": Row("SG", "causal attention aligns the last query with the last key"),
    "T10": Row("SG", "sequences without queries or keys may lie anywhere in a batch"),
    "T11": Row("SG", "sequences without queries or keys change nothing for others"),
    "T13": Row("C", "a row that is masked as a whole is zero"),
    "T15": Row("C", "finite garbage at a masked key changes nothing"),
    "T18": Row("G", "keys that heads share by a stride of zero are read as their copies"),
    "T19": Row("C", "queries, keys and values may have any inner stride"),
    "T21": Row("SG", "any number of query heads shares a key head"),
    "T22": Row("SG", "six query heads share a key head"),
    "T23": Row("S", "a page table and a short last page give the tokens that they list"),
    "T25": Row("SG", "NaN in a last page's unused slots changes no bit"),
    "T26": Row("SG", "a sequence without tokens gives zeros, whatever its pages hold"),
    "T29": Row("ST", "a soft cap comes before the mask"),
    "T30": Row("C", "a window counts the keys before the query's own"),
    "T31": Row("S", "pages of 256 tokens are pages of 16"),
    "T34": Row("SG", "pages beyond 16 bits are found"),
    "T35": Row("SG", "pages beyond 2^31 elements are found"),
    "T37": Row("TG", "sequences beyond 2^31 elements are found"),
    "T38": Row("C", "more than 4096 tokens give finite results"),
    "T39": Row("G", "a token that is decoded is the one that was prefilled"),
    "T41": Row("S", "a longest length that is too large changes nothing"),
    "T42": Row("S", "a neighbour's length changes nothing"),
    "T43": Row("G", "large logits give finite results"),
    "T46": Row("G", "more keys than 16 bits count are attended to"),
    "T49": Row("G", "constant values come out as they are"),
    "K1": Row("SG", "a cache that is a slice of a packed buffer is written by its strides"),
    "K2": Row("SG", "rows of padding are skipped by a negative slot, and fewer slots are refused"),
    "K3": Row("S", "a slot behind the cache is refused in debug()"),
    "K5": Row("S", "a last page of more tokens than a page holds is refused in debug()"),
    "E1": Row("ST", "a row of NaN chooses distinct experts that exist"),
    "E2": Row("S", "128 experts and 8 of them are weighed like any others"),
    "E3": Row("SG", "an expert past 256 is chosen"),
    "E5": Row("S", "all assignments of one expert are sorted, and padded by their number"),
    "E6": Row("ST", "any number of experts is sorted into"),
    "E7": Row("ST", "an id of no expert adds nothing, and nothing is read for it"),
    "E9": Row("TG", "experts find tokens beyond 2^31 elements"),
    "E10": Row("G", "more than 32768 tokens are run, each of them"),
    "E11": Row("SG", "a token without experts is zero, whatever memory held"),
    "E13": Row("S", "several experts of several tokens are those of each token"),
    "E14": Row("SG", "no tokens give no results"),
    "K6": Row("S", "a page more than the tokens need is refused in debug(), with its length of 0"),
    "Q1": Row("SG", "no tokens give no codes"),
    "Q2": Row("SG", "zeros have one scale, whatever their layout"),
    "Q3": Row("SG", "zeros have codes of 0 and a finite scale"),
    "Q5": Row("SG", "codes are the nearest, to the even of two, up to the largest"),
    "Q6": Row("SG", "bytes are those of the dtype that names them"),
    "Q7": Row("SG", "the largest element gets the largest code"),
    "Q9": Row("G", "a quantization finds rows beyond 2^31 elements"),
    "Q10": Row("CT", "int8 codes saturate at -127 and 127"),
    "Q11": Row("CT", "halves go to the even whole number"),
    "Q15": Row("SG", "rows of nothing give no codes"),
    "S1": Row("SG", "a row of one positive number gives its index"),
    "S2": Row("CG", "what disables a filter keeps the tail"),
    "S3": Row("SG", "what top-p keeps reaches p"),
    "S5": Row("CG", "exactly k of equal numbers are kept"),
    "S6": Row("CT", "ties don't depend on the number of rows"),
    "S7": Row("TG", "rows of a padded buffer are read by their stride"),
    "S9": Row("C", "a row that isn't of numbers gives an index of the vocabulary"),
    "S10": Row("C", "what is drawn is what the filter keeps, among equal numbers too"),
    "S11": Row("C", "the number that crosses p is kept"),
    "S13": Row("C", "a row of padding gives an index of the vocabulary"),
}
"""By id in the catalogue of numeric faults."""

CASES = {
    "22": Row("G", "nothing is loaded or compiled while a stream is capturing: prepare first"),
    "29": Row("G", "tensors needn't be on the current device"),
    "31": Row("G", "a replay reads what its buffers hold then"),
}
"""By number in the list of scenarios: those for GPUs."""

ELSEWHERE = {
    "N22": "it is about a test of a backward, which no op has",
    "T14": "a mask tensor",
    "T17": "weights of PyTorch's own module",
    "T27": "fp8 keys",
    "T33": "logits of pages for their own sake",
    "T45": "a workspace of split keys, which no op takes",
    "T47": "a bias tensor",
}
"""What a row is about that none of these ops has."""
