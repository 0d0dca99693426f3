"""The methods of scikit-learn's estimators that become bricks."""

from __future__ import annotations

from cbtop.profiler.instrument.libraries.functions import KeyFrom, LibraryFunction

_METHODS = (
    "fit fit_transform fit_predict partial_fit predict predict_proba decision_function transform kneighbors score"
)
_ESTIMATORS = {
    "sklearn.cluster": "KMeans MiniBatchKMeans DBSCAN HDBSCAN AgglomerativeClustering SpectralClustering MeanShift",
    "sklearn.decomposition": "PCA IncrementalPCA KernelPCA NMF TruncatedSVD FastICA LatentDirichletAllocation",
    "sklearn.ensemble": "RandomForestClassifier RandomForestRegressor ExtraTreesClassifier ExtraTreesRegressor "
    "GradientBoostingClassifier GradientBoostingRegressor HistGradientBoostingClassifier "
    "HistGradientBoostingRegressor IsolationForest",
    "sklearn.gaussian_process": "GaussianProcessClassifier GaussianProcessRegressor",
    "sklearn.linear_model": "LinearRegression Ridge Lasso ElasticNet LogisticRegression SGDClassifier SGDRegressor",
    "sklearn.manifold": "TSNE Isomap MDS SpectralEmbedding",
    "sklearn.mixture": "GaussianMixture BayesianGaussianMixture",
    "sklearn.neighbors": "KNeighborsClassifier KNeighborsRegressor NearestNeighbors",
    "sklearn.neural_network": "MLPClassifier MLPRegressor",
    "sklearn.pipeline": "Pipeline",
    "sklearn.preprocessing": "StandardScaler MinMaxScaler PolynomialFeatures OneHotEncoder",
    "sklearn.svm": "SVC SVR LinearSVC LinearSVR",
    "sklearn.tree": "DecisionTreeClassifier DecisionTreeRegressor",
}

SKLEARN: tuple[LibraryFunction, ...] = tuple(
    LibraryFunction(module, f"{kind}.{method}", f"sklearn.{{}}.{method}", by_class=True, key_from=KeyFrom.NOTHING)
    for module, kinds in _ESTIMATORS.items()
    for kind in kinds.split()
    for method in _METHODS.split()
)
